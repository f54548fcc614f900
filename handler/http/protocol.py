"""An HTTP connection of the server, with limits against hostile clients and a graceful close."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import uvicorn
from uvicorn.protocols.utils import get_local_addr, get_remote_addr
from uvicorn.server import ServerState

from handler.core.errors import BadRequest, ServingError, Unavailable
from handler.http.exchange import EXCHANGE, STARTED, ConnectionFlow, Exchange, Successor
from handler.http.parser import BETWEEN, BODY, HEAD, MAX_HEAD, RawHeaders, RequestHead, RequestParser
from handler.protocols.kernel.errors import FRONT_END, SERVER, ErrorFormat, retry_headers

HEAD_SECONDS = 60.0  # maximum seconds for the request line and headers, from their first byte or the connection's start
LINGER_SECONDS = 2.0
"""Number of seconds to read and discard unwanted bytes: the rest of a refused body, and bytes after the last response.
An immediate close would reset the connection, and the client might lose a response that it has not read yet.
"""
_PIECE = 1 << 11  # bytes of a head or of chunks that are parsed at a time
_MAX_PARTS = 64  # maximum pieces and parts of bodies of a connection that are parsed before it waits for a turn
_MAX_AHEAD = 1 << 16  # bytes behind a pipelined request; the connection is not read while more are held
_HEAD_END = b"\r\n\r\n"
_MAX_TURN_BYTES = 1 << 15  # bytes of heads that are parsed in an iteration of the event loop before others must wait
_SHORT_HEAD = 512  # maximum size of a head that need not wait for others, as that of a health check, in bytes
_MAX_BEGUN = 16  # maximum number of requests that begin in an iteration of the event loop,
_MAX_QUICK = 8  # of which this many have no body; a page may take milliseconds
_MAX_CALLS = 1024  # maximum number of calls in an iteration, including calls of clients that have left
_MAX_LEFT = 64  # maximum number of connections that are closed in an iteration because their clients have left
_NEW_CONNECTION = 1  # each new connection lowers _MAX_BEGUN by this: the next in the kernel's queue may be for /ping
_QUICK_METHODS = (b"GET ", b"HEAD ")  # methods of a health check, parsed at once even while clients connect
_PROBES = ("/ping", "/health")  # these begin at once


class LoopTurns:
    """Divides each iteration of the event loop fairly among the connections.

    In each iteration, the loop reads all connections with new bytes, so the work that one connection starts delays the
    others. Heads are parsed first. While clients connect, only heads of GET and HEAD requests are parsed. Then requests
    begin in turns, a few per iteration, and fewer while many clients connect. Requests without a body begin before
    other requests. Long heads and requests with long paths share a budget of bytes per iteration. When many clients
    leave together, some of their connections are closed in each iteration.

    Attributes:
        num_new: number of connections that clients have made in this iteration.
        context: context in which requests begin, because the task of another request may begin them.
    """

    def __init__(self) -> None:
        self._quick = deque[Callable[[], object]]()
        self._others = deque[Callable[[], object]]()
        self._left = deque[asyncio.Transport]()
        self.num_new = self._num_begun = self._num_bytes = self._num_left = 0
        self._is_due = False
        self.context = contextvars.copy_context()

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

    def leave(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> bool:
        """Count a connection whose client has left.

        Returns:
            Whether it stays open for now. In that case, it is closed in one of the next iterations.
        """
        self._expect(loop)
        self._num_left += 1
        if self._num_left <= _MAX_LEFT:
            return False
        self._left.append(transport)
        return True

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
        self.num_new = self._num_begun = self._num_bytes = self._num_left = 0
        if self._left:
            self._expect(loop)
            self._close_left()
        if not (self._quick or self._others):
            return
        self._expect(loop)
        self._begin(self._quick, min(limit, _MAX_QUICK))
        self._begin(self._others, max(limit, self._num_begun + 1))

    def _close_left(self) -> None:
        self._num_left = min(len(self._left), _MAX_LEFT)
        for _ in range(self._num_left):
            self._left.popleft().close()


class Timer:
    """The only timer of a connection: it limits heads, idle time and the final close.

    Each request sets and clears it. It therefore leaves the timer of the event loop running, and looks at the time that
    was set last when that one ends.

    Attributes:
        loop: the event loop.
        due: time of the event loop at which the call is made, in seconds, or None without a call.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._call: Callable[[], object] = bool
        self._handle: asyncio.TimerHandle | None = None
        self._handle_due = 0.0
        self.due: float | None = None

    def set(self, seconds: float, call: Callable[[], object]) -> None:
        """Make a call after a number of seconds, instead of the one that was set before."""
        self.due = self.loop.time() + seconds
        self._call = call
        if self._handle is not None and self._handle_due > self.due:
            self.cancel_handle()
        if self._handle is None:
            self._handle_due = self.due
            self._handle = self.loop.call_later(seconds, self._end)

    def clear(self) -> None:
        """Make no call."""
        self.due = None

    def cancel_handle(self) -> None:
        """End the timer of the event loop, so that it no longer refers to the connection."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _end(self) -> None:
        self._handle = None
        if self.due is None:
            return
        left = self.due - self.loop.time()
        if left > 0:
            self.set(left, self._call)
        else:
            self._call()


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


_STOPPING = Unavailable("the server is stopping")


class Protocol(asyncio.Protocol):
    """An HTTP connection, which a uvicorn server creates. It has these properties:

    * The request line, headers and trailers are limited in size and number. Trailers are discarded, and never count as
      headers.
    * Heads and chunks are parsed incrementally, and requests begin in turns (`LoopTurns`).
    * An application may accept the offer to upgrade the protocol. By default, offers are ignored: Java's HttpClient and
      `curl --http2` offer HTTP/2 in every request.
    * HTTP/1.0 clients can read streams too, without chunked encoding. Closing the connection ends the stream.
    * Only one pipelined request waits behind the current request. The bytes after it are not parsed. Up to 64 KiB of
      them are read, so that a disconnect of the client is noticed.
    * If a connection must be closed early, earlier requests still get their complete responses, in order.

    Args:
        config: configuration of the server, of which the application and the idle time are used.
        state: the server's connections, running requests and default headers.
        turns: turns that the connections of the server share.

    Attributes:
        flow: flow control, set when the connection is made.
        transport: transport, set when the connection is made.
        timeout_keep_alive: maximum time that the connection may be idle between two requests, in seconds.
    """

    flow: ConnectionFlow
    transport: asyncio.Transport
    _scope: dict[str, Any]  # what the scopes of all requests have in common
    _last_words: bytes | None = None  # written after the last response; when set, nothing more is read

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        turns: LoopTurns | None = None,
    ) -> None:
        self.timeout_keep_alive: float = config.timeout_keep_alive
        self._app = config.loaded_app
        self._server = server_state
        self.turns = turns or LoopTurns()
        self._timer = Timer(_loop or asyncio.get_running_loop())
        self._parser = RequestParser(self)
        self._held = bytearray()  # bytes that wait for a turn, or for the response before the pipelined request
        self._exchanges: list[Exchange] = []  # the request that is being answered, and a pipelined one behind it

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Event loop of the connection."""
        return self._timer.loop

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of all responses, such as the date."""
        return self._server.default_headers

    # -- the connection ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.flow = ConnectionFlow(transport)
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "server": get_local_addr(transport),
            "client": get_remote_addr(transport),
            "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
            "root_path": "",
        }
        self._server.connections.add(self)  # type: ignore[arg-type]  # uvicorn only calls `shutdown`
        self.turns.note_connection(self.loop)
        self._timer.set(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._timer.clear()
        self._timer.cancel_handle()
        self._held.clear()
        self._last_words = b""
        if self._exchanges:
            self._exchanges[0].disconnect()
        self.flow.resume_writing()

    def eof_received(self) -> bool:
        """Return whether to keep the connection open for a response. TLS closes both directions together."""
        self.flow.has_ended = True
        if self._scope["scheme"] == "https":
            return False
        if self._exchanges and self._exchanges[0].is_whole:
            return self.turns.leave(self.loop, self.transport)
        if self._held and self._last_words is None:
            return True  # the bytes may be complete requests
        if self._exchanges and self._last_words is None:
            self._stop()
        return bool(self._exchanges) or self.turns.leave(self.loop, self.transport)

    def shutdown(self) -> None:
        """Close the connection after the pending responses, without waiting for a body that is still being received."""
        if self._held and not self._exchanges:  # these bytes wait for a turn
            self._advance()
        if self._parser.phase >= BODY and self._last_words is None:
            return self._stop(_refusal(_STOPPING, FRONT_END))
        if self._exchanges:
            self._exchanges[-1].keep_alive = False
        else:
            self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection, unless a request has arrived in time and is only waiting for its turn."""
        due = self._timer.due
        if self._held:
            self._advance()  # this clears or sets the timer when it parses a request
        if self._timer.due == due:
            self.transport.close()

    def pause_writing(self) -> None:
        self.flow.pause_writing()
        if self._exchanges:
            self._exchanges[0].is_paused = True

    def resume_writing(self) -> None:
        self.flow.resume_writing()

    def _stop(self, last_words: bytes = b"") -> None:
        """Stop reading. Answer all complete requests, then write `last_words` and close the connection."""
        self._last_words = last_words
        if self._parser.phase >= BODY:  # the newest request will never be complete
            if len(self._exchanges) > 1:
                self._exchanges.pop()
            elif not self._exchanges or self._exchanges[0].phase >= STARTED:
                self._last_words = b""  # the request already has a response
            else:
                self._exchanges.pop().disconnect()
        if not self._exchanges:
            self._close()

    def _close(self) -> None:
        if self.transport.is_closing():
            return
        if self._last_words:
            self.transport.write(self._last_words)
        if self.flow.has_ended:
            return self.transport.close()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading("held")
        self.flow.resume_reading()
        self._timer.set(LINGER_SECONDS, self.timeout_keep_alive_handler)

    # -- bytes from the client -----------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._last_words is not None:
            return
        is_waiting = bool(self._held)
        self._held += data
        if is_waiting:
            self._limit_reading()
        elif self._parser.phase >= BODY and len(self._exchanges) < 2:
            self._limit_reading()
            self.turns.soon(self.loop, self._advance)
        elif self._must_wait(data):
            self._limit_reading()
            self.turns.soon(self.loop, self._advance, later=True)
        else:
            self._advance()

    def _must_wait(self, data: bytes) -> bool:
        """Return whether a head that begins or continues with `data` is parsed only in a later iteration."""
        if self.turns.is_spent and self._parser.head_size + len(data) > _SHORT_HEAD:
            return True
        return self.turns.num_new > 0 and not data.startswith(_QUICK_METHODS)

    def _limit_reading(self) -> None:
        """Stop or resume reading. A disconnect of the client is noticed only while the connection is read."""
        if self.flow.has_ended:
            return
        if len(self._held) > (_MAX_AHEAD if len(self._exchanges) > 1 else 0):
            self.flow.pause_reading("held")
        else:
            self.flow.resume_reading("held")

    def _advance(self) -> bool:
        """Parse received bytes until a request is waiting behind the current request, or until this turn ends.

        Returns:
            Whether there was something to parse.
        """
        held, parser, exchanges = self._held, self._parser, self._exchanges
        start, parser.num_parts = 0, 0
        while start < len(held) and self._last_words is None and len(exchanges) < 2 and parser.num_parts < _MAX_PARTS:
            end = start + (min(parser.num_left, MAX_HEAD) or _PIECE)
            if not parser.num_left and (head_end := held.find(_HEAD_END, start, end)) >= 0:
                end = head_end + len(_HEAD_END)  # so that no more than one head is parsed
            parser.num_parts += 1
            self._receive(held[start:end])
            start = end
        del held[: len(held) if self._last_words is not None else start]
        self._limit_reading()
        if held and len(exchanges) < 2:
            self.turns.soon(self.loop, self._advance, later=True)
        elif self.flow.has_ended and not held and self._last_words is None:
            self._stop()
        return start > 0

    def _receive(self, data: bytearray) -> None:
        if self._parser.phase < BODY:
            self.turns.note_bytes(self.loop, len(data))
        try:
            self._parser.feed(data)
        except ServingError as error:
            return self._stop(_refusal(error))
        if self._parser.phase == HEAD and not self._exchanges and self._timer.due is None:
            self._timer.set(HEAD_SECONDS, self.timeout_keep_alive_handler)

    # -- what the bytes contain ----------------------------------------------------------------------------------

    def on_begin(self) -> None:
        if not self._exchanges:
            self._timer.clear()

    def on_head(self, head: RequestHead, headers: RawHeaders) -> None:
        scope = {
            **self._scope,
            "http_version": head.version,
            "method": head.method,
            "path": head.path,
            "raw_path": head.raw_path,
            "query_string": head.query,
            "headers": headers,
            "state": {},
        }
        exchange = Exchange(self, head, scope)
        scope["extensions"] = {EXCHANGE: exchange}
        self._exchanges.append(exchange)
        if len(self._exchanges) == 1:
            self._timer.clear()
            self._start(exchange)
        else:
            self.flow.resume_reading()  # otherwise the client's disconnect would not be noticed

    def on_body(self, part: bytes) -> None:
        if self._exchanges:
            self._exchanges[-1].add_body(part)

    def on_end(self) -> None:
        if self._exchanges:
            self._exchanges[-1].end_body()
        else:  # the request was already answered
            self._timer.set(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _start(self, exchange: Exchange) -> None:
        """Begin to answer a request in its turn."""
        method = exchange.scope["method"]
        if method in ("GET", "HEAD") and exchange.scope["path"] in _PROBES:
            return self._run(exchange)

        def start() -> bool:
            if exchange.is_over:
                return False
            self.turns.note_bytes(self.loop, len(exchange.scope["raw_path"]))
            self._run(exchange)
            return True

        self.turns.soon(self.loop, start, quick=method != "POST")

    def _run(self, exchange: Exchange) -> None:
        task = self.turns.context.run(self.loop.create_task, exchange.run(self._app))
        self._server.tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        """Remove a task that has ended from the tasks of the server."""
        self._server.tasks.discard(task)
        if task.cancelled():  # before its first step, so that it has sent no response
            self.transport.close()

    # -- responses -----------------------------------------------------------------------------------------------

    def end_response(self, *, keep_alive: bool) -> None:
        """Go on with the next request after a response has been written, or close the connection."""
        is_unread = self._parser.phase >= BODY and len(self._exchanges) < 2
        self._server.total_requests += 1
        if not keep_alive and not is_unread:
            self.transport.close()
        elif not keep_alive:
            self._stop()  # more bytes of the body may still arrive
        del self._exchanges[0]
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self._exchanges:
            self._start(self._exchanges[0])
        elif self._last_words is not None:
            return self._close()
        else:
            self._wait_for_more(is_unread=is_unread)
        if self._held:
            self.turns.soon(self.loop, self._advance)

    def _wait_for_more(self, *, is_unread: bool) -> None:
        if is_unread:
            self._timer.set(LINGER_SECONDS, self._stop)
        else:
            self._timer.set(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def switch(self, successor: Successor) -> None:
        """Pass the connection on to another protocol (see `Exchange.switch`)."""
        is_last = len(self._exchanges) < 2 and not self._held and self._parser.phase == BETWEEN
        if not is_last or self.flow.has_ended or self._last_words is not None or self.transport.is_closing():
            raise BadRequest("a request that upgrades the protocol must be the last one of its connection")
        self._server.connections.discard(self)
        self._server.total_requests += 1
        self._timer.clear()
        self._timer.cancel_handle()
        self._exchanges.clear()
        self.flow.resume_reading("held")
        self.flow.resume_reading()
        self.transport.set_protocol(successor)
        connections: set[Any] = self._server.connections
        connections.add(successor)
        successor.forget = functools.partial(connections.discard, successor)
        successor.connection_made(self.transport)

    def note_whole(self, exchange: Exchange) -> None:
        """Close the connection if the client of a response that will be sent whole has already closed its side."""
        if self.flow.has_ended:
            exchange.disconnect()
            self.transport.close()
