"""A request and its answer on a connection, as an ASGI extension; made of plain ASGI for other servers than ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

from starlette.types import Message, Receive, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

EXCHANGE = "lmi.http.exchange"
"""Name of the ASGI extension: the request's `Exchange`."""


class Exchange:
    """A request and its answer: what ASGI lacks, or has at the price of a task.

    Attributes:
        wake: a call that ends the current or the next `wait`.
        send_whole: a call that says that the answer will be sent whole, when it is complete. A client that ends its
            own side of the connection then counts as gone: it may only have half-closed it, but nothing is written
            by which that could be found out. Without this call its answer is written to it until a write fails.
        is_held: `write_chunk` refuses until the next `open`: the answer has not begun, the socket is full, the client
            has gone, or bytes that come before wait elsewhere.
        written_at: time of the last chunk, by time.monotonic().
    """

    __slots__ = ("_cycle", "_flush", "_reads_on", "_transport", "is_held", "send_whole", "wake", "written_at")

    def __init__(
        self,
        cycle: RequestResponseCycle,
        transport: asyncio.Transport,
        flush: Callable[[], None],
        send_whole: Callable[[], None],
    ) -> None:
        self._cycle = cycle
        self._flush = flush  # what `send` has not written yet
        self._reads_on = False  # the connection has been read since the body's end
        self._transport = transport
        self.is_held = True
        self.written_at = 0.0
        self.wake = cycle.message_event.set
        self.send_whole = send_whole

    @property
    def is_over(self) -> bool:
        """Whether the client has gone, or the answer is complete."""
        return self._cycle.disconnected or self._cycle.response_complete

    @property
    def num_unread(self) -> int:
        """Bytes that were written, and that the socket has not taken yet."""
        return self._transport.get_write_buffer_size()

    def drop(self) -> None:
        """Close the connection at once, without the rest of the answer."""
        self.is_held = True
        self._cycle.disconnected = True
        self._transport.abort()

    def open(self) -> None:
        """Let `write_chunk` write, where an answer has begun, is not complete, and the socket takes more."""
        cycle = self._cycle
        self._flush()
        self.is_held = self.is_over or cycle.flow.write_paused or not cycle.chunked_encoding

    async def wait(self, seconds: float | None = None) -> None:
        """Return at a `wake`, when the exchange is over, or after some seconds. The body must have been read."""
        if not self._reads_on:
            self._reads_on = True
            self._cycle.flow.resume_reading()  # else the client's end would not be noticed
        await _wait(self._cycle.message_event, seconds)

    async def read(self) -> None:
        """Wait until the client has read what was written, but for what fits into buffers; or is gone."""
        if self._cycle.flow.write_paused:
            await self._cycle.flow.drain()

    def send_head(self) -> None:
        """Write the head of an answer that has begun, which waits for the first bytes otherwise."""
        self._flush()

    def write_chunk(self, data: bytes) -> bool:
        """Write a chunk of a begun, unfinished answer: the hot path, once a token.

        Returns:
            False: only `send` can write it now.
        """
        if self.is_held:
            return False
        if data:  # an empty chunk would be the end
            self.written_at = monotonic()
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class AsgiExchange:
    """The same by `receive` and `send` alone: a task listens for the client's end, and another one sends the chunks.

    `send` takes the place of the server's own. Attributes as in `Exchange`.
    """

    is_held = True  # `send` writes everything
    num_unread = 0  # the server counts them itself

    def __init__(self, receive: Receive, send: Send, http_version: str) -> None:
        self._receive = receive
        self._send = send
        self._has_connection_headers = http_version.startswith("1")
        self._event = asyncio.Event()
        self._listener: asyncio.Task[None] | None = None
        self.is_over = False
        self.written_at = 0.0
        self.wake = self._event.set

    def send_whole(self) -> None:
        """Without effect: whether a client that ended its own side has gone is the server's decision."""

    def drop(self) -> None:
        """Write nothing more. The server closes the connection, and may log that the answer is not complete."""
        self._end()

    def open(self) -> None:
        """Without effect: there is no shorter way than `send`."""

    async def read(self) -> None:
        """Without effect: `send` has waited, as the server has it."""

    def send_head(self) -> None:
        """Without effect: the server decides when it writes."""

    def write_chunk(self, data: bytes) -> bool:
        return False

    async def wait(self, seconds: float | None = None) -> None:
        """As `Exchange.wait`."""
        if self._listener is None:
            self._listener = asyncio.ensure_future(self._listen())
        await _wait(self._event, seconds)

    async def send(self, message: Message) -> None:
        """Send a message of the answer, from a task: `BodyWriter` steps this up to its first wait only.

        Raises:
            OSError: the server could not send it.
        """
        await asyncio.sleep(0)
        if self.is_over:
            return
        if message["type"] == "http.response.start" and not self._has_connection_headers:
            headers = [(name, value) for name, value in message["headers"] if name != b"connection"]
            message = {**message, "headers": headers}
        try:
            await self._send(message)
        except Exception as error:  # each server has its own for a client that has gone
            self._end()
            raise OSError(f"the ASGI server could not send: {error}") from error
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._end()

    def close(self) -> None:
        """The request is over."""
        if self._listener is not None:
            self._listener.cancel()

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._end()

    def _end(self) -> None:
        self.is_over = True
        self.wake()


AnyExchange = Exchange | AsgiExchange


async def _wait(event: asyncio.Event, seconds: float | None) -> None:
    """Return when the event is set, or after some seconds, and clear it."""
    timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, event.set)
    try:
        await event.wait()
        event.clear()
    finally:
        if timer is not None:
            timer.cancel()
