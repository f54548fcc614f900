"""A request and its response, as an ASGI server passes them to an application, and the operations that ASGI lacks."""

from __future__ import annotations

import asyncio
import functools
import logging
import operator
import re
import socket
import struct
from collections.abc import Callable, Iterable, MutableMapping
from http import HTTPStatus
from time import monotonic
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Send

from handler.http.parser import RequestHead

if TYPE_CHECKING:
    from handler.http.protocol import LoopTurns, Protocol

EXCHANGE = "lmi.http.exchange"
"""Name of the ASGI extension whose value is the request's `Exchange`."""

# The characters of a response's headers.
_IN_NAMES = re.sub(rb"[\x00-\x1f\x7f()<>@,;:\[\]={} \t\\\"]", b"", bytes(range(256)))
_IN_VALUES = re.sub(rb"[\x00-\x08\x0a-\x1f\x7f]", b"", bytes(range(256)))
_DROPPED = (b"transfer-encoding", b"connection")  # headers that a client of HTTP/1.0 does not get
_FRAMED_BY = (b"content-length", *_DROPPED)  # headers that tell how the body is sent
_LARGE_BODY = 1 << 16  # bytes of a body that wait for the application; beyond it, no more is read
FAILURE: list[tuple[bytes, bytes]] = [
    (b"content-type", b"text/plain; charset=utf-8"),
    (b"content-length", b"21"),
    (b"connection", b"close"),
]

log = logging.getLogger("uvicorn.error")


# The phases of a response, in order. Up to Python 3.11, reading a member of an enumeration would cost a call.
WAITING = 0  # the application has not started the response
STARTED = 1  # the response has a status and headers
COMPLETE = 2  # the last part of the body has been written
DISCONNECTED = 3  # the client has disconnected before the response was complete

# What is known of the body of a request. A state is a sum of these.
_RECEIVED = 1  # the client has sent all of it
_TAKEN = 2  # the application has taken a part of it, or all
_EXPECTED = 4  # the client waits for a response with status 100 before it sends the body

# How the client recognizes the end of a response.
_BY_LENGTH = 0  # by the Content-Length, or because such a response never has a body
_BY_CHUNK = 1  # by the last chunk
_BY_CLOSE = 2  # by the end of the connection, because the client uses HTTP/1.0
_BY_HEAD = 3  # by the end of the head, because the request method is HEAD


class WriteFlow:
    """The flow control of what is written to a connection.

    Attributes:
        write_paused: whether the socket accepts no more data.
    """

    def __init__(self) -> None:
        self._writable = asyncio.Event()
        self.write_paused = False

    def pause_writing(self) -> None:
        self.write_paused = True
        self._writable.clear()

    def resume_writing(self) -> None:
        self.write_paused = False
        self._writable.set()

    async def drain(self) -> None:
        """Wait until the socket accepts more data."""
        await self._writable.wait()


class ConnectionFlow(WriteFlow):
    """The flow control of a connection in both directions.

    Args:
        transport: transport of the connection.

    Attributes:
        has_ended: whether the client has closed its side of the connection.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._reasons = set[str]()  # reasons not to read the connection
        self.has_ended = False

    def pause_reading(self, reason: str = "body") -> None:
        """Stop reading until it is resumed for each reason."""
        if not self._reasons and not self._transport.is_closing():
            self._transport.pause_reading()
        self._reasons.add(reason)

    def resume_reading(self, reason: str = "body") -> None:
        if reason not in self._reasons:
            return
        self._reasons.remove(reason)
        if not self._reasons and not self._transport.is_closing():
            self._transport.resume_reading()


class Successor(asyncio.Protocol):
    """A protocol that takes over the transport of an HTTP connection.

    Attributes:
        forget: removes the protocol from the connections of the server. Call it when the connection is lost.
    """

    forget: Callable[[], object]

    def shutdown(self) -> None:
        """Close the connection because the server is stopping."""
        raise NotImplementedError


class AnyExchange:
    """A request and its response, with the operations that ASGI either lacks or offers only at the cost of a task.

    By default, the operations do nothing, because the server does not need them.

    Args:
        memo: values that follow from the head of the request, or None (see `RequestHead`).

    Attributes:
        phase: phase of the response.
        wake: function that ends the current or the next `wait`.
        written_at: time of the last chunk, as returned by time.monotonic().
        is_paused: whether `write_chunk` refuses chunks until the next `resume`: the response has not started, the
            socket is full, the client has disconnected, or earlier bytes have not been sent yet.
    """

    __slots__ = ("_event", "is_paused", "memo", "phase", "wake", "written_at")

    def __init__(self, memo: dict[object, Any] | None = None) -> None:
        self._event = asyncio.Event()
        self.memo = memo
        self.phase = WAITING
        self.is_paused = True
        self.wake = self._event.set
        self.written_at = 0.0

    @property
    def is_over(self) -> bool:
        """Return whether the client has disconnected or the response is complete."""
        return self.phase >= COMPLETE

    @property
    def has_body(self) -> bool:
        """Return whether it is known that the whole body has been received."""
        return False

    @property
    def num_unsent(self) -> int:
        """Return the number of bytes that were written but not yet accepted by the socket."""
        return 0

    def take_body(self) -> bytes | None:
        """Return the whole body, as `receive` would, or None if the application must call `receive`."""
        return None

    def disconnect(self) -> None:
        """Tell the application that the client has disconnected."""
        self.is_paused = True
        self.phase = DISCONNECTED
        self._event.set()

    def drop(self) -> None:
        """Close the connection immediately, without sending the rest of the response."""

    def send_whole(self) -> None:
        """Announce that the response will be sent only when it is complete. A client that closes its side of the
        connection is then treated as disconnected. It may only have half-closed the connection, but there is no write
        that would show this. Without this call, the response is sent until a write fails.
        """

    def send_head(self) -> None:
        """Write the head of a response that has started. By default it is written with the first bytes of the body."""

    def resume(self) -> None:
        """Allow `write_chunk` again if the response has started, is not complete, and the socket accepts more data."""

    async def wait(self, seconds: float | None = None) -> None:
        """Wait until `wake` is called, the exchange is over, or `seconds` have passed. The body must have been read."""
        await wait_for_event(self._event, seconds)

    async def read(self) -> None:
        """Wait until the client has disconnected, or until the unread rest of the response fits into buffers."""

    def write_chunk(self, data: bytes) -> bool:
        """Write a chunk of a response.

        Returns:
            Whether the chunk was written; if not, it must be sent with `send`.
        """
        return False


class Exchange(AnyExchange):
    """A request and its response on a connection of this server.

    Args:
        head: head of the request.
        scope: scope of the request, as in ASGI.

    Attributes:
        is_whole: whether the response is sent only when it is complete.
        keep_alive: whether the connection stays open after the response.
    """

    __slots__ = (
        "_body", "_body_state", "_connection", "_framing", "_left", "_unwritten", "is_whole", "keep_alive", "scope",
    )  # fmt: skip

    def __init__(self, connection: Protocol, head: RequestHead, scope: MutableMapping[str, Any]) -> None:
        super().__init__(head.memo)
        self._connection = connection
        self._body = bytearray()
        self._body_state = _EXPECTED if head.expects_continue else 0
        self._framing = _BY_HEAD if head.method == "HEAD" else _BY_LENGTH
        self._left = 0  # bytes of the body that are still to be written, with _BY_LENGTH
        self._unwritten = b""  # the head of the response, until the first bytes of the body are written with it
        self.scope = scope
        self.keep_alive = head.keep_alive
        self.is_whole = False

    # -- the request ---------------------------------------------------------------------------------------------

    def add_body(self, part: bytes) -> None:
        """Add bytes of the body. The connection is not read while the application takes too few of them."""
        self._body += part
        if len(self._body) > _LARGE_BODY:
            self._connection.flow.pause_reading()
        self._event.set()

    def end_body(self) -> None:
        self._body_state |= _RECEIVED
        self._event.set()

    @property
    def has_body(self) -> bool:
        return bool(self._body_state & _RECEIVED)

    def take_body(self) -> bytes | None:
        if self._body_state != _RECEIVED or self.phase >= COMPLETE:
            return None
        self._body_state |= _TAKEN
        self._event.clear()
        self._connection.flow.resume_reading()
        body = bytes(self._body)
        self._body.clear()
        return body

    async def receive(self) -> Message:
        transport = self._connection.transport
        if self._body_state & _EXPECTED and not (self.is_over or transport.is_closing()):
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._body_state &= ~_EXPECTED
        if not self.is_over:
            self._connection.flow.resume_reading()
            if not self._event.is_set():
                await self._event.wait()
            self._event.clear()
        if self.is_over:
            return {"type": "http.disconnect"}
        self._body_state |= _TAKEN
        body = bytes(self._body)
        self._body.clear()
        return {"type": "http.request", "body": body, "more_body": not self.has_body}

    # -- the response --------------------------------------------------------------------------------------------

    async def run(self, app: ASGIApp) -> None:
        """Call the application. If it fails, the response is status 500, or it breaks off."""
        try:
            await app(self.scope, self.receive, self.send)
            if self.phase < COMPLETE:
                ending = "completing" if self.phase == STARTED else "starting"
                log.error("ASGI callable returned without %s response.", ending)
                await self._break_off()
        except BaseException as error:
            log.error("Exception in ASGI application\n", exc_info=error)
            await self._break_off()

    async def _break_off(self) -> None:
        if self.phase == WAITING:
            await self.send({"type": "http.response.start", "status": 500, "headers": FAILURE})
            await self.send({"type": "http.response.body", "body": b"Internal Server Error"})
        elif self.phase != DISCONNECTED:
            self.send_head()
            self._connection.transport.close()

    async def send(self, message: Message) -> None:
        """Send a message of the response. It waits only while the socket is full.

        Raises:
            RuntimeError: the message is not allowed here, or is not valid.
        """
        if self._connection.flow.write_paused and self.phase != DISCONNECTED:
            await self._connection.flow.drain()
        if self.phase == DISCONNECTED:
            return
        expected = "http.response.start" if self.phase == WAITING else "http.response.body"
        if message["type"] != expected or self.phase == COMPLETE:
            raise RuntimeError(f"the application sent {message['type']} where {expected} was expected, or too late")
        if self.phase == STARTED:
            self._send_body(message.get("body", b""), last=not message.get("more_body", False))
        elif self.phase == WAITING:
            self.phase = STARTED
            self._body_state &= ~_EXPECTED
            self._unwritten = self._head(message["status"], message.get("headers", ()))

    def _head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """Return the head of the response, and determine how its body is sent.

        Raises:
            RuntimeError: a header has characters that are not allowed.
        """
        is_old = self.scope["http_version"] < "1.1"  # the client knows no chunks
        has_length = self._framing == _BY_HEAD or status in (204, 304)
        says_close = False
        lines = []
        headers = [*self._connection.default_headers, *headers]
        _check(headers)
        for name, value in headers:
            name = name.lower()
            if name not in _FRAMED_BY:
                lines.append(b"%b: %b\r\n" % (name, value))
                continue
            if is_old and name in _DROPPED:
                continue
            if name == b"content-length" and self._framing == _BY_LENGTH:
                has_length = True
                self._left = int(value)
            elif name == b"transfer-encoding" and value.lower() == b"chunked":
                self._left = 0
                if self._framing == _BY_LENGTH:
                    self._framing = _BY_CHUNK
            elif name == b"connection" and b"close" in map(bytes.strip, value.lower().split(b",")):
                says_close = True
                self.keep_alive = False
            lines.append(b"%b: %b\r\n" % (name, value))
        fields = b"".join(lines)
        if not (self.keep_alive or says_close):
            fields += b"connection: close\r\n"
        if not has_length and self._framing == _BY_LENGTH:
            fields += self._without_length(is_old=is_old)
        return _status_line(status) + fields + b"\r\n"

    def _without_length(self, *, is_old: bool) -> bytes:
        """Choose the framing of a body without Content-Length, and return the header for it."""
        if not is_old:
            self._framing = _BY_CHUNK
            return b"transfer-encoding: chunked\r\n"
        self._framing = _BY_CLOSE
        self._reset_when_closed(True)
        return b""

    def _reset_when_closed(self, yes: bool) -> None:
        """Set whether the connection is reset when it is closed, so that the response does not seem complete."""
        connection: socket.socket = self._connection.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", yes, 0))

    def _send_body(self, body: bytes, *, last: bool) -> None:
        data = self._unwritten + self._framed(body, last=last)
        self._unwritten = b""
        if data:
            self._connection.transport.write(data)
        if not last:
            return
        if self._left:
            raise RuntimeError("the response is shorter than its Content-Length")
        self.phase = COMPLETE
        self._event.set()
        if self._framing == _BY_CLOSE:
            self._reset_when_closed(False)
        self.scope["extensions"].clear()  # this breaks a reference cycle
        self._connection.end_response(keep_alive=self.keep_alive)

    def _framed(self, body: bytes, *, last: bool) -> bytes:
        if self._framing == _BY_LENGTH:
            if len(body) > self._left:
                raise RuntimeError("the response is longer than its Content-Length")
            self._left -= len(body)
            return body
        if self._framing == _BY_CHUNK:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            return chunk + b"0\r\n\r\n" if last else chunk
        return body if self._framing == _BY_CLOSE else b""

    # -- operations that ASGI lacks ------------------------------------------------------------------------------

    @property
    def num_unsent(self) -> int:
        return self._connection.transport.get_write_buffer_size()

    @property
    def turns(self) -> LoopTurns:
        """Return the turns that the connections of the server share."""
        return self._connection.turns

    def send_whole(self) -> None:
        self.is_whole = True
        self._connection.note_whole(self)

    def send_head(self) -> None:
        if self._unwritten:
            self._connection.transport.write(self._unwritten)
            self._unwritten = b""

    def drop(self) -> None:
        self.disconnect()
        self._connection.transport.abort()

    def switch(self, successor: Successor) -> None:
        """Pass the connection on to another protocol, which writes the response with status 101.

        Raises:
            BadRequest: the client has sent more than the head, or has closed its side of the connection.
        """
        self._connection.switch(successor)
        self.phase = COMPLETE
        self._event.set()
        self.scope["extensions"].clear()  # this breaks a reference cycle

    def resume(self) -> None:
        self.send_head()
        can_write = self.phase == STARTED and not self._connection.flow.write_paused
        self.is_paused = not (can_write and self._framing == _BY_CHUNK)

    async def wait(self, seconds: float | None = None) -> None:
        self._connection.flow.resume_reading()  # otherwise the client's disconnect would not be noticed
        await wait_for_event(self._event, seconds)

    async def read(self) -> None:
        if self._connection.flow.write_paused:
            await self._connection.flow.drain()

    def write_chunk(self, data: bytes) -> bool:
        """Write a chunk of a response. This is the hot path, called once per token."""
        if self.is_paused:
            return False
        if data:  # an empty chunk would end the response
            self.written_at = monotonic()
            self._connection.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


def _check(headers: list[tuple[bytes, bytes]]) -> None:
    """Raise RuntimeError if a header of a response has characters that are not allowed.

    Names and values are checked apart, because a value with a line end would look like two headers.
    """
    names = b"".join(map(operator.itemgetter(0), headers))
    values = b"".join(map(operator.itemgetter(1), headers))
    if names.translate(None, _IN_NAMES) or values.translate(None, _IN_VALUES):
        raise RuntimeError("the application sent a header with characters that are not allowed")


@functools.lru_cache(64)
def _status_line(status: int) -> bytes:
    phrase = HTTPStatus(status).phrase if status in {*HTTPStatus} else ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


class AsgiExchange(AnyExchange):
    """An exchange for other ASGI servers, which uses only `receive` and `send`.

    One task waits until the client disconnects, and another task sends the chunks. The application must call the `send`
    method of the exchange instead of that of the server, which waits for the client and counts unsent bytes itself.
    """

    def __init__(self, receive: Receive, send: Send, http_version: str) -> None:
        super().__init__()
        self._receive = receive
        self._send = send
        self._has_connection_headers = http_version.startswith("1")
        self._listener: asyncio.Task[None] | None = None

    def drop(self) -> None:
        """Stop sending. The server closes the connection, and may log that the response is not complete."""
        self._end()

    async def wait(self, seconds: float | None = None) -> None:
        if self._listener is None:
            self._listener = asyncio.ensure_future(self._listen())
        await wait_for_event(self._event, seconds)

    async def send(self, message: Message) -> None:
        """Send a message of the response. Nothing is sent before the first suspension, because `BodyWriter` runs this
        coroutine up to there itself and leaves the rest to a task.

        Raises:
            OSError: the server could not send the message.
        """
        await asyncio.sleep(0)
        if self.is_over:
            return
        if message["type"] == "http.response.start" and not self._has_connection_headers:
            headers = [(name, value) for name, value in message["headers"] if name != b"connection"]
            message = {**message, "headers": headers}
        try:
            await self._send(message)
        except Exception as error:  # servers raise different exceptions after a disconnect
            self._end()
            raise OSError(f"the ASGI server could not send the response: {error}") from error
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._end()

    def close(self) -> None:
        """End the exchange after the request."""
        if self._listener is not None:
            self._listener.cancel()

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._end()

    def _end(self) -> None:
        self.phase = COMPLETE
        self.wake()


async def wait_for_event(event: asyncio.Event, seconds: float | None) -> None:
    """Wait until the event is set or `seconds` have passed, then clear the event."""
    timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, event.set)
    try:
        await event.wait()
        event.clear()
    finally:
        if timer is not None:
            timer.cancel()
