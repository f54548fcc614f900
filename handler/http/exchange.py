"""A request and its answer on a connection, as an ASGI extension."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

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

    __slots__ = ("_cycle", "_reads_on", "_transport", "is_held", "send_whole", "wake", "written_at")

    def __init__(
        self, cycle: RequestResponseCycle, transport: asyncio.Transport, send_whole: Callable[[], None]
    ) -> None:
        self._cycle = cycle
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

    def open(self) -> None:
        """Let `write_chunk` write, where an answer has begun, is not complete, and the socket takes more."""
        cycle = self._cycle
        self.is_held = self.is_over or cycle.flow.write_paused or not cycle.chunked_encoding

    async def wait(self, seconds: float | None = None) -> None:
        """Return at a `wake`, when the exchange is over, or after some seconds. The body must have been read."""
        event = self._cycle.message_event
        if not self._reads_on:
            self._reads_on = True
            self._cycle.flow.resume_reading()  # else the client's end would not be noticed
        timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self.wake)
        try:
            await event.wait()
            event.clear()
        finally:
            if timer is not None:
                timer.cancel()

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
