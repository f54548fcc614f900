"""The HTTP protocol of uvicorn, with limits against hostile clients, a graceful close, and an ASGI extension."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from time import monotonic
from typing import Any

import httptools
from starlette.types import Message, Receive, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from handler.core.errors import BadRequest, ServingError, Unavailable
from handler.core.numbers import is_digits
from handler.http import uvicorn_internals as uvicorn_internals  # checks the installed version
from handler.http.urls import unquoted
from handler.protocols.kernel.errors import FRONT_END, SERVER, ErrorFormat, retry_headers

EXCHANGE = "lmi.http.exchange"
"""Name of the ASGI extension whose value is the request's `Exchange`."""


class Exchange:
    """A request and its response, with operations that ASGI either lacks or offers only at the cost of a task.

    Attributes:
        wake: function that ends the current or the next `wait`.
        send_head: function that writes the head of a response that has started. By default it is written with the first
            bytes of the body.
        send_whole: function that announces that the response will be sent only when it is complete. A client that
            closes its side of the connection is then treated as disconnected. It may only have half-closed the
            connection, but there is no write that would show this. Without this call, the response is sent until a
            write fails.
        is_paused: whether `write_chunk` refuses chunks until the next `resume`: the response has not started, the
            socket is full, the client has disconnected, or earlier bytes have not been sent yet.
        written_at: time of the last chunk, as returned by time.monotonic().
    """

    __slots__ = ("_cycle", "_reads_on", "_transport", "is_paused", "send_head", "send_whole", "wake", "written_at")

    def __init__(
        self,
        cycle: RequestResponseCycle,
        transport: asyncio.Transport,
        send_head: Callable[[], None],
        send_whole: Callable[[], None],
    ) -> None:
        self._cycle = cycle
        self._reads_on = False  # whether the connection is being read after the end of the body
        self._transport = transport
        self.is_paused = True
        self.written_at = 0.0
        self.wake = cycle.message_event.set
        self.send_head = send_head
        self.send_whole = send_whole

    @property
    def is_over(self) -> bool:
        """Return whether the client has disconnected or the response is complete."""
        return self._cycle.disconnected or self._cycle.response_complete

    @property
    def num_unsent(self) -> int:
        """Return the number of bytes that were written but not yet accepted by the socket."""
        return self._transport.get_write_buffer_size()

    def drop(self) -> None:
        """Close the connection immediately, without sending the rest of the response."""
        self.is_paused = True
        self._cycle.disconnected = True
        self._transport.abort()

    def resume(self) -> None:
        """Allow `write_chunk` again if the response has started, is not complete, and the socket accepts more data."""
        cycle = self._cycle
        self.send_head()
        self.is_paused = self.is_over or cycle.flow.write_paused or not cycle.chunked_encoding

    async def wait(self, seconds: float | None = None) -> None:
        """Wait until `wake` is called, the exchange is over, or `seconds` have passed. The body must have been read."""
        if not self._reads_on:
            self._reads_on = True
            self._cycle.flow.resume_reading()  # otherwise the client's disconnect would not be noticed
        await _wait(self._cycle.message_event, seconds)

    async def read(self) -> None:
        """Wait until the client has disconnected, or until the unread rest of the response fits into buffers."""
        if self._cycle.flow.write_paused:
            await self._cycle.flow.drain()

    def write_chunk(self, data: bytes) -> bool:
        """Write a chunk of a response. This is the hot path, called once per token.

        Returns:
            Whether the chunk was written; if not, it must be sent with `send`.
        """
        if self.is_paused:
            return False
        if data:  # an empty chunk would end the response
            self.written_at = monotonic()
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class AsgiExchange:
    """An exchange for other ASGI servers, which uses only `receive` and `send`.

    One task waits until the client disconnects, and another task sends the chunks. The application must call the `send`
    method of the exchange instead of that of the server. The class has the attributes of `Exchange`.
    """

    is_paused = True  # everything is written with `send`
    num_unsent = 0  # the server counts unsent bytes itself

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
        """Do nothing, because the server decides whether a half-closed connection counts as disconnected."""

    def drop(self) -> None:
        """Stop sending. The server closes the connection, and may log that the response is not complete."""
        self._end()

    def resume(self) -> None:
        """Do nothing, because everything is written with `send`."""

    async def read(self) -> None:
        """Do nothing, because the `send` method of the server has already waited for the client."""

    def send_head(self) -> None:
        """Do nothing, because the server decides when it writes the head."""

    def write_chunk(self, data: bytes) -> bool:
        return False

    async def wait(self, seconds: float | None = None) -> None:
        """Wait until `wake` is called, the exchange is over, or `seconds` have passed."""
        if self._listener is None:
            self._listener = asyncio.ensure_future(self._listen())
        await _wait(self._event, seconds)

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
        self.is_over = True
        self.wake()


AnyExchange = Exchange | AsgiExchange


async def _wait(event: asyncio.Event, seconds: float | None) -> None:
    """Wait until the event is set or `seconds` have passed, then clear the event."""
    timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, event.set)
    try:
        await event.wait()
        event.clear()
    finally:
        if timer is not None:
            timer.cancel()


HEAD_SECONDS = 60.0  # maximum seconds for the request line and headers, from their first byte or the connection's start
LINGER_SECONDS = 2.0
"""Number of seconds to read and discard unwanted bytes: the rest of a refused body, and bytes after the last response.
An immediate close would reset the connection, and the client might lose a response that it has not read yet.
"""
_MAX_HEAD = 1 << 16  # maximum size of request line, headers and trailers, in bytes; SageMaker sends a few hundred
_MAX_LINE = 1 << 13  # maximum size of the request line, in bytes, as in nginx and Apache
_LINE_OVERHEAD = len("  HTTP/1.1")  # bytes of the request line besides the method and the target
MAX_FIELDS = 128  # maximum number of headers and trailers; Apache and gunicorn allow 100
_PIECE = 1 << 11  # bytes of a head or of chunks that are parsed at a time
_MAX_PARTS = 64  # maximum pieces and parts of bodies of a connection that are parsed before it waits for a turn
_MAX_AHEAD = 1 << 16  # bytes behind a pipelined request; the connection is not read while more are held
_HEAD_END = b"\r\n\r\n"
_MAX_TURN_BYTES = 1 << 15  # bytes of heads that are parsed in an iteration of the event loop before others must wait
_SHORT_HEAD = 512  # maximum size of a head that need not wait for others, as that of a health check, in bytes
_MAX_BEGUN = 16  # maximum number of requests that begin in an iteration of the event loop,
_MAX_QUICK = 8  # of which this many have no body; a page may take milliseconds
_MAX_CALLS = 1024  # maximum number of calls in an iteration, including calls of clients that have left
_NEW_CONNECTION = 1  # each new connection lowers _MAX_BEGUN by this: the next in the kernel's queue may be for /ping
_QUICK_METHODS = (b"GET ", b"HEAD ")  # methods of a health check, parsed at once even while clients connect
_PROBES = ("/ping", "/health")  # these begin at once


class LoopTurns:
    """Divides each iteration of the event loop fairly among the connections.

    In each iteration, the loop reads all connections with new bytes, so the work that one connection starts delays the
    others. Heads are parsed first. While clients connect, only heads of GET and HEAD requests are parsed. Then requests
    begin in turns, a few per iteration, and fewer while many clients connect. Requests without a body begin before
    other requests. Long heads and requests with long paths share a budget of bytes per iteration.

    Attributes:
        num_new: number of connections that clients have made in this iteration.
    """

    def __init__(self) -> None:
        self._quick = deque[Callable[[], object]]()
        self._others = deque[Callable[[], object]]()
        self.num_new = self._num_begun = self._num_bytes = 0
        self._is_due = False

    @property
    def is_spent(self) -> bool:
        """Whether heads must wait for the next iteration, because this one has processed too many bytes of heads."""
        return self._num_bytes >= _MAX_TURN_BYTES

    def note_bytes(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        """Count bytes of heads, whose processing takes time in proportion."""
        self._num_bytes += number
        self._expect(loop)

    def note_connection(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count a new connection in this iteration."""
        self.num_new += 1
        self._expect(loop)

    def soon(
        self,
        loop: asyncio.AbstractEventLoop,
        call: Callable[[], object],
        *,
        quick: bool = False,
        later: bool = False,
    ) -> None:
        """Make a call now or in one of the next iterations.

        Args:
            call: function that returns False if it had nothing to do. In that case, the call does not use a turn.
            quick: whether the call goes before calls that are not quick.
            later: whether the call must not be made now.
        """
        self._expect(loop)
        calls = self._quick if quick else self._others
        calls.append(call)
        if not (later or self.is_spent) and len(self._quick) + len(self._others) == 1:
            self._begin(calls, min(self._begin_limit(), _MAX_QUICK if quick else _MAX_BEGUN))

    def _expect(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_due:
            self._is_due = True
            loop.call_soon(self._turn, loop)

    def _begin_limit(self) -> int:
        return max(1, _MAX_BEGUN - _NEW_CONNECTION * self.num_new)

    def _begin(self, calls: deque[Callable[[], object]], limit: int) -> None:
        for number in range(min(len(calls), _MAX_CALLS)):  # calls that are added meanwhile are for later iterations
            if self._num_begun >= limit or (number and self.is_spent):
                return
            self._num_begun += 1
            if calls.popleft()() is False:
                self._num_begun -= 1

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_due, limit = False, self._begin_limit()
        self.num_new = self._num_begun = self._num_bytes = 0
        if not (self._quick or self._others):
            return
        self._expect(loop)
        self._begin(self._quick, min(limit, _MAX_QUICK))
        self._begin(self._others, max(limit, self._num_begun + 1))


class _Flow(FlowControl):
    """Flow control of a connection that is not read while received bytes wait to be parsed."""

    is_held = False

    def set_held(self, is_held: bool) -> None:
        if is_held == self.is_held:
            return
        self.is_held = is_held
        if not self.read_paused and not self._transport.is_closing():
            (self._transport.pause_reading if is_held else self._transport.resume_reading)()

    def pause_reading(self) -> None:
        if self.is_held:
            self.read_paused = True
        else:
            super().pause_reading()

    def resume_reading(self) -> None:
        if self.is_held:
            self.read_paused = False
        else:
            super().resume_reading()


class _HeadTooLarge(BadRequest):
    status = 431


class _LineTooLong(BadRequest):
    status = 414


def _refusal(error: ServingError, errors: ErrorFormat = SERVER) -> bytes:
    answer = errors.whole(error)
    headers = [
        ("content-type", answer.content_type),
        ("content-length", str(len(answer.body))),
        *retry_headers(answer.status, answer.retry_after),
        *answer.headers,
        ("connection", "close"),
    ]
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    phrase = HTTPStatus(answer.status).phrase
    return f"HTTP/1.1 {answer.status} {phrase}\r\n{lines}\r\n".encode() + answer.body


_INVALID = BadRequest("this is not a valid HTTP request")
_TOO_MUCH = (
    f"the request's headers or trailers are too long or too many: at most {_MAX_HEAD} bytes and {MAX_FIELDS} fields"
)
_TOO_LARGE = _HeadTooLarge(_TOO_MUCH)
_TOO_LONG = _LineTooLong(f"the request line, which contains the path and the query, has more than {_MAX_LINE} bytes")
_STOPPING = Unavailable("the server is stopping")


class Protocol(HttpToolsProtocol):
    """An HTTP connection. `uvicorn_internals` lists the parts of uvicorn that this class uses. The class differs from
    uvicorn's own class in these points:

    * The request line, headers and trailers are limited in size and number. Trailers are discarded, and never count as
      headers.
    * Heads and chunks are parsed incrementally, and requests begin in turns (`LoopTurns`).
    * Offers to upgrade the protocol are ignored. Java's HttpClient and `curl --http2` offer HTTP/2 in every request.
    * HTTP/1.0 clients can read streams too, without chunked encoding. Closing the connection ends the stream.
    * Only one pipelined request waits behind the current request. The bytes after it are not parsed. Up to 64 KiB of
      them are read, so that a disconnect of the client is noticed. uvicorn parses all bytes that it receives.
    * If a connection must be closed early, earlier requests still get their complete responses, in order.
    * `timeout_keep_alive_task` is the only timer of the connection. It limits heads, idle time and the final close.
    """

    _in_head = False
    _in_body = False  # in the body or the trailers of the newest request
    _line_size = 0  # bytes of the newest request line
    _head_size = 0  # bytes of request line, headers and trailers that were parsed
    _num_fields = 0  # number of headers and trailers that were parsed
    _num_left = 0  # bytes of the newest request's body that are not parsed yet, if its head says how many
    _num_parts = 0  # pieces and parts of bodies that were parsed since the connection's turn began
    _unparsed = 0  # bytes received since the parser's last callback
    _current: RequestResponseCycle | None = None  # the request that is being answered
    _last_words: bytes | None = None  # written after the last response; when set, nothing more is read
    _eof = False  # the client has closed its side of the connection
    _is_whole = False  # the current response will be sent whole (`Exchange.send_whole`)
    flow: _Flow

    def __init__(self, *arguments: Any, turns: LoopTurns | None = None, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._turns = turns or LoopTurns()
        self._held = bytearray()  # bytes that wait for a turn, or for the response before the pipelined request

    # -- the connection ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self._turns.note_connection(self.loop)
        self._cycle_transport = _CycleTransport(self)
        self._set_timer(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_keepalive_if_required()
        if self._current is not None:  # uvicorn notifies only the newest request, which may wait behind this one
            _disconnect(self._current)
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to keep the connection open for a response. TLS closes both directions together."""
        self._eof = True
        if self._is_whole or self.scheme == "https":
            return False
        if self._held and self._last_words is None:
            return True  # the bytes may be complete requests
        if self._current is not None and self._last_words is None:
            self._stop()
        return self._current is not None

    def shutdown(self) -> None:
        """Close the connection after the pending responses, without waiting for a body that is still being received."""
        if self._held and self._current is None:  # these bytes wait for a turn
            self._advance()
        if self._in_body and self._last_words is None:
            self._stop(_refusal(_STOPPING, FRONT_END))
        super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection, unless a request has arrived in time and is only waiting for its turn."""
        timer = self.timeout_keep_alive_task
        if self._held:
            self._advance()  # this stops or replaces the timer when it parses a request
        if self.timeout_keep_alive_task is timer:
            super().timeout_keep_alive_handler()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._current is not None:
            _pause(self._current)

    def _set_timer(self, seconds: float, then: Callable[[], None]) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(seconds, then)

    def _stop(self, last_words: bytes = b"") -> None:
        """Stop reading. Answer all complete requests, then write `last_words` and close the connection."""
        self._last_words = last_words
        if self._in_body:  # the newest request will never be complete
            if self.pipeline:
                self.pipeline.popleft()
            elif self._current is None or self._current.response_started:
                self._last_words = b""  # the request already has a response
            else:
                _disconnect(self._current)
                self._current = None
        if self._current is None:
            self._close()

    def _close(self) -> None:
        if self.transport.is_closing():
            return
        if self._last_words:
            self.transport.write(self._last_words)
        if self._eof:
            return self.transport.close()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.set_held(False)
        self.flow.resume_reading()
        self._set_timer(LINGER_SECONDS, self.timeout_keep_alive_handler)

    # -- bytes from the client -----------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._last_words is not None:
            return
        is_waiting = bool(self._held)
        self._held += data
        if is_waiting:
            self._limit_reading()
        elif self._in_body and not self.pipeline:
            self._limit_reading()
            self._turns.soon(self.loop, self._advance)
        elif self._must_wait(data):
            self._limit_reading()
            self._turns.soon(self.loop, self._advance, later=True)
        else:
            self._advance()

    def _must_wait(self, data: bytes) -> bool:
        """Return whether a head that begins or continues with `data` is parsed only in a later iteration."""
        if self._turns.is_spent and self._head_size + len(data) > _SHORT_HEAD:
            return True
        return self._turns.num_new > 0 and not data.startswith(_QUICK_METHODS)

    def _limit_reading(self) -> None:
        """Stop or resume reading. A disconnect of the client is noticed only while the connection is read."""
        if not self._eof:
            self.flow.set_held(len(self._held) > (_MAX_AHEAD if self.pipeline else 0))

    def _advance(self) -> bool:
        """Parse received bytes until a request is waiting behind the current request, or until this turn ends.

        Returns:
            Whether there was something to parse.
        """
        if self.parser is None:
            return False  # the connection is lost
        held, start, self._num_parts = self._held, 0, 0
        while start < len(held) and self._last_words is None and not self.pipeline and self._num_parts < _MAX_PARTS:
            end = start + (min(self._num_left, _MAX_HEAD) or _PIECE)
            if not self._num_left and (head_end := held.find(_HEAD_END, start, end)) >= 0:
                end = head_end + len(_HEAD_END)  # so that no more than one head is parsed
            self._num_parts += 1
            self._receive(held[start:end])
            start = end
        del held[: len(held) if self._last_words is not None else start]
        self._limit_reading()
        if held and not self.pipeline:
            self._turns.soon(self.loop, self._advance, later=True)
        elif self._eof and not held and self._last_words is None:
            self._stop()
        return start > 0

    def _receive(self, data: bytearray) -> None:
        self._unparsed += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            if self._line_size > _MAX_LINE:
                return self._stop(_refusal(_TOO_LONG))
            if self._head_size <= _MAX_HEAD:
                self.logger.warning("Invalid HTTP request received.")
                return self._stop(_refusal(_INVALID))
        if self._head_size + self._unparsed > _MAX_HEAD:
            self._stop(_refusal(_TOO_LARGE))
        elif self._in_head and self._current is None and self.timeout_keep_alive_task is None:
            self._set_timer(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def _parse(self, data: bytearray | bytes) -> None:
        """Parse bytes, ignoring offers to upgrade the protocol.

        The parser always stops after a head that contains such an offer. A new parser then reads the same head without
        the offer, because the old parser would accept no more data after `Connection: close`.
        """
        while True:
            try:
                return self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                if self.parser.get_method() == b"CONNECT":
                    raise httptools.HttpParserError("CONNECT") from None
                data = self._head_without_upgrade() + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _count(self, size: int) -> None:
        self._unparsed = 0
        self._head_size += size
        self._turns.note_bytes(self.loop, size)
        if self._head_size > _MAX_HEAD:
            raise httptools.HttpParserError("the head is too large")

    # -- callbacks of the parser ---------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._in_head = True
        self._line_size = self._head_size = self._num_fields = self._unparsed = 0
        if self._current is None:
            self._unset_keepalive_if_required()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)
        self._line_size = len(self.parser.get_method()) + len(self.url) + _LINE_OVERHEAD
        if self._line_size > _MAX_LINE:
            raise httptools.HttpParserError("the request line is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_fields += 1
        size = len(name) + len(value) + 4  # including colon, space and line end
        self._count(size if self._num_fields <= MAX_FIELDS else _MAX_HEAD)
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        escaped = httptools.parse_url(self.url) if b"%" in self.url else None
        if escaped is not None:
            self.url = b"/"  # uvicorn would unquote the path with urllib, which takes milliseconds
        super().on_headers_complete()
        if escaped is not None:
            self._set_path(escaped)
        self.cycle.transport = self._cycle_transport  # type: ignore[assignment]
        self._in_head, self._in_body = False, True
        length = dict(self.headers).get(b"content-length", b"")
        self._num_left = int(length) if is_digits(length) else 0
        if not self.parser.should_keep_alive():  # uvicorn 0.40 overlooks `close` among other tokens
            self.cycle.keep_alive = False
        if self.scope["http_version"] < "1.1":
            self.cycle.keep_alive = self.cycle.waiting_for_100_continue = False
            send = _without_chunks(self.cycle, self.transport.get_extra_info("socket"))
            self.cycle.send = send  # type: ignore[assignment,method-assign]  # before the application's task first runs
        if not self.pipeline:
            self._current = self.cycle
            self._unset_keepalive_if_required()
        else:
            self.flow.resume_reading()  # uvicorn has paused it, and the client's disconnect would not be noticed
        exchange = Exchange(self.cycle, self.transport, self._cycle_transport.flush, self._end_at_eof)
        extensions: dict[str, Any] = {EXCHANGE: exchange}
        self.scope["extensions"] = extensions

    def _set_path(self, url: Any) -> None:
        """Set the path and the query in the scope of the newest request, whose task has not run yet."""
        path = url.path or b"/"  # it is missing from an absolute URL without a path
        self.scope["path"] = unquoted(path)
        self.scope["raw_path"] = path
        self.scope["query_string"] = url.query or b""

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        method, path = cycle.scope["method"], cycle.scope["path"]
        if method in ("GET", "HEAD") and path in _PROBES:
            return super()._start_asgi_task(cycle, app)

        def start() -> bool:
            if not cycle.disconnected:
                self._turns.note_bytes(self.loop, len(cycle.scope["raw_path"]))
                super(Protocol, self)._start_asgi_task(cycle, app)
            return not cycle.disconnected

        self._turns.soon(self.loop, start, quick=method != "POST")

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        self._num_parts += 1
        self._num_left = max(0, self._num_left - len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_body, self._num_left = False, 0
        super().on_message_complete()
        if self._current is None:  # the request was already answered
            self._set_timer(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    # -- responses -----------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        is_unread = self._in_body and not self.pipeline
        self._cycle_transport.end()
        if self._current is not None:
            self._current.scope["extensions"].clear()  # this breaks a reference cycle
        self._current = self.pipeline[-1][0] if self.pipeline else None
        self._is_whole = False
        super().on_response_complete()  # starts the next request, or the keep-alive timer
        if self.transport.is_closing():
            return
        if self._current is None and self._last_words is not None:
            return self._close()
        if self._current is None and is_unread:
            self._set_timer(LINGER_SECONDS, self._stop)
        if self._held and not self.pipeline:
            self._turns.soon(self.loop, self._advance)

    def close_after_answer(self) -> None:
        """Close the connection after a response with `connection: close`. More bytes of the body may still arrive."""
        if self._in_body and not self.pipeline:
            self._stop()
        else:
            self.transport.close()

    def _end_at_eof(self) -> None:
        self._is_whole = True
        if self._eof:
            if self._current is not None:
                _disconnect(self._current)
            self.transport.close()


def _pause(cycle: RequestResponseCycle) -> None:
    extensions: dict[str, Any] = cycle.scope["extensions"]
    if exchange := extensions.get(EXCHANGE):  # it is removed after the response
        exchange.is_paused = True


class _CycleTransport:
    """The transport that uvicorn writes responses to. It buffers a head until the first bytes of the body, to send both
    in one write, and closes the connection as `Protocol` requires.
    """

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self._head: bytes | None = None  # head of the current response; b"" after it has been written
        self.is_closing = protocol.transport.is_closing

    def write(self, data: bytes) -> None:
        if self._head is not None:
            data, self._head = self._head + data, b""
        elif (cycle := self._protocol._current) is not None and cycle.response_started:
            self._head = data
            return
        self._protocol.transport.write(data)

    def flush(self) -> None:
        """Write the head if it is buffered."""
        if self._head:
            self._protocol.transport.write(self._head)
            self._head = b""

    def end(self) -> None:
        """End the current response. The response to a HEAD request consists of its head only."""
        self.flush()
        self._head = None

    def close(self) -> None:
        self.end()
        self._protocol.close_after_answer()


def _without_chunks(
    cycle: RequestResponseCycle, connection: socket.socket
) -> Callable[[Any], Coroutine[Any, Any, None]]:
    """Return the `send` function of the cycle for a client without support for chunked encoding.

    uvicorn would use chunked encoding for a response without Content-Length. Without chunks, it compares the size of
    the body with the Content-Length. The returned function therefore adjusts the expected length with each part.
    Closing the connection then ends the response, so a connection that ends early must be reset.
    """
    send = cycle.send
    has_length = True

    def reset_when_closed(yes: bool) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", yes, 0))

    async def send_without_chunks(message: Any) -> None:
        nonlocal has_length
        if cycle.disconnected:
            return
        if message["type"] == "http.response.start":
            dropped = (b"transfer-encoding", b"connection")
            headers = [header for header in message.get("headers", ()) if header[0].lower() not in dropped]
            has_length = any(name.lower() == b"content-length" for name, _ in headers)
            message = {**message, "headers": [*headers, (b"connection", b"close")]}
            if not has_length:
                cycle.chunked_encoding = False
                reset_when_closed(True)
        elif not has_length:
            is_last = not message.get("more_body", False)
            cycle.expected_content_length = len(message.get("body", b"")) + (not is_last)
            if is_last:
                reset_when_closed(False)
        await send(message)

    return send_without_chunks


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Tell the application that the client has disconnected."""
    _pause(cycle)
    cycle.disconnected = True
    cycle.message_event.set()
