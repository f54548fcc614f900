"""Routes for inference: read a request, and write its answer until the last byte or until the client is gone."""

from __future__ import annotations

import asyncio
import logging
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast
from urllib.parse import parse_qs

from starlette.types import Message, Receive, Scope, Send

from handler.core.errors import MethodNotAllowed, ModelNotFound, Overloaded, ServingError, TooLarge, TooSlow
from handler.core.framing import dumps
from handler.core.log import of_request
from handler.core.loop import start_now
from handler.http.protocol import EXCHANGE, AnyExchange
from handler.protocols.kernel.dialect import Dialect
from handler.protocols.kernel.errors import SERVER, ErrorFormat, HttpResponse, retry_headers
from handler.scheduler.batcher import ClientChannel
from handler.serving.head import QUERY_ADAPTER
from handler.serving.model import ServedModel
from handler.serving.task import RequestTask, ignored_header
from handler.serving.turns import BODY_MEMORY, Share

log = logging.getLogger("handler.server")

Headers = list[tuple[bytes, bytes]]
Handle = Callable[[Scope, Receive, Send], Awaitable[None]]

SHARED = "shared_headers"
"""Where the scope keeps headers that every answer to its request has: cheaper than a wrapper around `send`."""
AS_IT_COMES = (b"x-accel-buffering", b"no")
"""Has nginx pass each part of a stream on at once, and keep the header to itself."""
KEEP_ALIVE = 15.0  # seconds of silence after which a stream says that it is there, where its dialect does
_MOST_OF_PATH = 200  # characters in the log
_MOST_DIGITS = 18  # of a length: more bytes than there are anywhere
GIVEN_UP = "body_given_up"
"""In the scope of a request whose body is not waited for: its answer ends the connection."""


def headers_by_name(scope: Scope) -> dict[str, str]:
    """Return the request's headers; the first of each name counts."""
    return {key.decode("latin-1"): value.decode("latin-1") for key, value in reversed(scope["headers"])}


@dataclass(frozen=True)
class Endpoint:
    """A route's handlers, by method, as an ASGI application.

    Attributes:
        errors: how the route refuses other methods, and requests without a key; None: as the server does.
    """

    handlers: Mapping[str, Handle]
    errors: ErrorFormat | None = None

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        method = scope["method"]
        handle = self.handlers.get("GET" if method == "HEAD" else method)
        if handle is not None:
            return handle(scope, receive, send)
        return send_json(scope, send, 200, {}) if method == "OPTIONS" else self._refuse(scope, send)

    async def _refuse(self, scope: Scope, send: Send) -> None:
        error = MethodNotAllowed("Request method is not allowed, please refer to API document.")
        allowed = [name for method in self.handlers for name in (method, *(("HEAD",) if method == "GET" else ()))]
        allow = [(b"allow", ", ".join(allowed).encode())]
        await send_refusal(scope, send, (self.errors or SERVER).whole(error), allow)


async def read_body(
    scope: Scope, receive: Receive, limit: int, model: ServedModel, memory: Share | None = None
) -> bytes | None:
    """Read the body; None if the client disconnected.

    Args:
        limit: bytes that it may have; more are never kept.
        model: whose stop does not wait for it.
        memory: of which it takes what the body needs as it comes; None: it is done with soon.

    Raises:
        TooLarge, TooSlow: it breaks a limit.
        Overloaded: there is no memory for it.
    """
    body = start_now(_read_body(scope, receive, limit, memory or Share(model.memory)))
    if body.done():  # it came with the head
        return body.result()
    seconds = model.config.client_timeout
    try:
        with model.receiving():
            return await asyncio.wait_for(body, seconds)
    except asyncio.TimeoutError:
        scope[GIVEN_UP] = True
        raise TooSlow(f"the body did not arrive within {seconds:g} s (option.client_timeout)") from None


def declared_length(scope: Scope) -> int:
    """Return the body's length from its header; 0 if there is none."""
    length: str = scope["headers_by_name"].get("content-length", "").lstrip("0")
    return int(length[:_MOST_DIGITS]) if length.isdecimal() else 0


async def _read_body(scope: Scope, receive: Receive, limit: int, memory: Share) -> bytes | None:
    if (length := declared_length(scope)) > limit:
        scope[GIVEN_UP] = True
        raise TooLarge(f"the body has {length} bytes; at most {limit} (max_request_size)")
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        more = message.get("more_body", False)
        try:
            if size > limit:
                raise TooLarge(f"the body has more than {limit} bytes (max_request_size)")
            memory.take(BODY_MEMORY * len(part))
        except ServingError:
            parts.clear()
            memory.give_back()  # at once: it is room for another one
            if more:
                scope[GIVEN_UP] = True
            raise
        parts.append(part)
        if not more:
            return b"".join(parts)


def again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that replays a body that was already read, then continues."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


async def left_of_body(receive: Receive) -> bytes | None:
    """Read the rest of a body after middleware, in the middleware's own task; None if the client has disconnected."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def send_start(
    scope: Scope, send: Send, status: int, content_type: str, extra: Headers, retry_after: float = 0.0
) -> None:
    headers = [
        (b"content-type", content_type.encode()),
        (b"x-request-id", scope["request_id"].encode()),
        *scope.get(SHARED, ()),
        *((name.encode(), value.encode()) for name, value in retry_headers(status, retry_after)),
        *extra,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def send_answer(scope: Scope, send: Send, answer: HttpResponse, extra: Headers | None = None) -> None:
    headers = [(b"content-length", str(len(answer.body)).encode()), *encoded(answer.headers), *(extra or [])]
    if GIVEN_UP in scope:
        headers.append((b"connection", b"close"))
    await send_start(scope, send, answer.status, answer.content_type, headers, answer.retry_after)
    await send({"type": "http.response.body", "body": answer.body})


async def send_json(scope: Scope, send: Send, status: int, value: Any, extra: Headers | None = None) -> None:
    await send_answer(scope, send, HttpResponse(status, "application/json", dumps(value)), extra)


async def send_error(scope: Scope, send: Send, error: ServingError) -> None:
    """Refuse a request that no dialect answers."""
    await send_refusal(scope, send, SERVER.whole(error))


async def send_refusal(scope: Scope, send: Send, answer: HttpResponse, extra: Headers | None = None) -> None:
    """Send an answer to a request that is no inference, and so has no line of its own in the log: write one."""
    fields = {
        "request_id": scope["request_id"],
        "status": answer.status,
        "method": scope["method"],
        "path": scope["path"][:_MOST_OF_PATH],
    }
    log.info("id=%s status=%d method=%s path=%r", *fields.values(), extra={"fields": fields})
    await send_answer(scope, send, answer, extra)


def encoded(headers: Iterable[tuple[str, str]]) -> Headers:
    """Encode headers for ASGI."""
    return [(name.encode(), value.encode()) for name, value in headers]


_MAX_BACKLOG = 16 << 20
"""Bytes that are kept for a client that reads too slowly; one that lets more gather is dropped."""


class Source(Protocol):
    """A request's answer (`serving.task.RequestTask`)."""

    finished: bool

    def take(self) -> bytes: ...


class StreamChannel(ClientChannel, Protocol):
    """A way to the socket that is shorter than `send` (`http/protocol.Exchange`).

    Attributes:
        is_held: closed, since bytes that come before wait elsewhere.
        written_at: time of the last chunk, by time.monotonic().
        num_unread: bytes that were written, and that the socket has not taken yet.
    """

    is_held: bool
    written_at: float

    @property
    def num_unread(self) -> int: ...

    @property
    def wake(self) -> Callable[[], object]:
        """Wakes the task that waits for the stream's end, to check the writer."""

    def open(self) -> None: ...


class BodyWriter:
    """Sends chunks in order: at once while the socket takes them, from a task while the client reads too slowly.

    ASGI's `send` is a coroutine, but it only waits when the socket is full. So it is stepped by hand, which costs a
    fraction of waking a task; the first time that it does wait, a task goes on with it, and what comes meanwhile is
    joined and sent after it. A client that stops reading is ended by the kernel (`http/server.py`).

    Args:
        channel: takes chunks while nothing waits here.
        hold: told how many bytes are kept for the client now; raises Overloaded where all clients keep too many.

    Attributes:
        ended: the last chunk has been handed in.
        overflowed: the client read too slowly.
        broken: the client cannot be written to any more.
    """

    def __init__(self, send: Send, channel: StreamChannel, hold: Callable[[int], object] = bool) -> None:
        self._send = send
        self._channel = channel
        self._hold = hold
        self._backlog: list[bytes] = []
        self._size = 0
        self._task: asyncio.Task[None] | None = None
        self.ended = self.overflowed = self.broken = False

    def pull(self, source: Source) -> None:
        """Write a request's output."""
        data, last = source.take(), source.finished
        try:
            if not last and self._channel.write_chunk(data):
                return
        except Exception:  # the connection is closed, though nobody has said so
            return self._break()
        self.write(data, last=last)

    def write(self, data: bytes, *, last: bool = False) -> None:
        self.ended, self._channel.written_at = last, time.monotonic()
        if self.broken:
            return
        if self._task is not None:
            self._backlog.append(data)
            self._size += len(data)
            return self._count()
        try:
            message = {"type": "http.response.body", "body": data, "more_body": not last}
            sending = cast(Coroutine[Any, Any, None], self._send(message))
            waiting = sending.send(None)
        except StopIteration:
            self._channel.is_held = True
            if not last:
                self._channel.open()
            return self._count()
        except (OSError, RuntimeError):  # the connection is closed, though nobody has said so
            self._break()
            return
        self._channel.is_held = True
        self._size = len(data)
        self._task = asyncio.ensure_future(self._catch_up(sending, waiting, len(data)))
        self._count()

    def _note_sent(self, size: int) -> None:
        self._size -= size
        if not self.broken:
            self._count()

    def _count(self) -> None:
        """Count the bytes kept for the client, and drop the client if there are too many."""
        try:
            self._hold(self._size + self._channel.num_unread)
        except Overloaded:
            self.overflowed = True
        if self.overflowed or self._size > _MAX_BACKLOG:
            self.overflowed = True
            self._break()

    def _break(self) -> None:
        self._channel.is_held = True
        self._backlog.clear()
        if not self.broken:
            self.broken = True
            self._channel.wake()

    async def _catch_up(self, sending: Coroutine[Any, Any, None], waiting: Any, size: int) -> None:
        try:
            await _go_on(sending, waiting)
            self._note_sent(size)
            while self._backlog:
                data = b"".join(self._backlog)
                self._backlog.clear()
                await self._send({"type": "http.response.body", "body": data, "more_body": not self.ended})
                self._note_sent(len(data))
        except (OSError, RuntimeError):  # the connection was closed meanwhile
            self._break()
        finally:
            self._task = None
            if not (self.ended or self.broken):
                self._channel.open()


@types.coroutine
def _go_on(coroutine: Coroutine[Any, Any, None], waiting: Any) -> Generator[Any, Any, None]:
    """Await a coroutine that was already stepped up to its first wait, `waiting`."""
    yield waiting
    yield from coroutine


class Inference:
    """An ASGI application.

    Args:
        dialect: the route's own; None: the configured one.
    """

    def __init__(self, model: ServedModel, dialect: Dialect | None = None) -> None:
        self._model = model
        self._dialect = dialect

    @property
    def dialect(self) -> Dialect:
        """The dialect of its bodies."""
        return self._dialect or self._model.dialect

    @property
    def is_configured(self) -> bool:
        """Return whether its dialect is the configured one, whose routes take calls about sessions too."""
        return self._dialect is None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: AnyExchange = scope["extensions"][EXCHANGE]
        with self._open(scope, exchange) as task:
            await self._parse(scope, receive, task)
            if task.parsed is not None:
                if not task.parsed.streams:
                    exchange.send_whole()
                task.start()
                await _send(scope, send, task, exchange)
                await exchange.read()  # until then it takes memory
            elif task.error is not None:  # else the client has gone
                await send_answer(scope, send, task.take_whole())

    def refused(self, error: ServingError, request_id: str) -> HttpResponse:
        """Return the dialect's answer to a request that was refused before the engine got it; count it."""
        return self._model.refused(error, self._dialect, id=request_id).take_whole()

    def _open(self, scope: Scope, exchange: AnyExchange) -> RequestTask:
        """Begin a request; it wakes `exchange` when there is something to answer."""
        wake = exchange.wake

        def on_bytes(task: RequestTask) -> None:
            if task.unsent or task.finished:
                wake()

        names, id = scope["path_params"], scope["request_id"]
        name, version = names.get("model"), names.get("version", "1")
        own = self._model.config.model_name
        if name not in (None, own) or version != "1":
            return self._model.refused(ModelNotFound(name or "", version, served=[own]), self._dialect, id=id)
        headers = scope["headers_by_name"]
        if named := parse_qs(scope["query_string"].decode("latin-1")).get("adapter"):
            headers = {**headers, QUERY_ADAPTER: named[-1]}
        return self._model.open(headers, self._dialect, path=path_of(scope), id=id, on_bytes=on_bytes)

    async def _parse(self, scope: Scope, receive: Receive, task: RequestTask) -> None:
        """Read the body and parse it. It is not kept while the answer is sent."""
        if task.finished:
            return
        try:
            body = await read_body(scope, receive, self._model.config.max_request_size, self._model, task.memory)
            if body is not None:
                self._model.check_room()  # it may have taken its time
                await task.parse(body)  # what has come whole is answered, also at SIGTERM
        except ServingError as error:
            task.refuse(error)


def path_of(scope: Scope) -> str:
    """Return the path of a request, with its query."""
    query = scope["query_string"]
    return f"{scope['path']}?{query.decode('latin-1')}" if query else str(scope["path"])


async def _send(scope: Scope, send: Send, task: RequestTask, exchange: AnyExchange) -> None:
    """Write a request's answer as it comes, until the last byte or until the client is gone."""
    ignored, sign = encoded(ignored_header(task.ignored).items()), task.keep_alive
    started = False
    written_at = time.monotonic()
    while not (task.unsent or task.finished):
        if exchange.is_over:
            return
        silent = time.monotonic() - written_at
        if sign and silent >= KEEP_ALIVE:
            if not started:
                await _start_stream(scope, send, task, ignored)
                started = True
            await send({"type": "http.response.body", "body": sign, "more_body": True})
            written_at, silent = time.monotonic(), 0.0
        await exchange.wait(KEEP_ALIVE - silent if sign else None)
    if not task.streams:
        answer = task.take_whole()
        if started:  # what is refused now is the stream's end
            await send({"type": "http.response.body", "body": task.stream_end()})
        else:
            await send_answer(scope, send, answer, ignored)
    else:
        if not started:
            await _start_stream(scope, send, task, ignored)
        writer = BodyWriter(send, exchange, task.memory.hold)
        stream_to(task, writer)
        task.write_tokens_to(exchange)
        await _end_of(writer, exchange, sign)
        if not exchange.is_over:  # the client cannot be written to any more
            if writer.overflowed:
                id = scope["request_id"]
                told = "request %s: the connection is closed: its client reads too slowly"
                log.info(told, id, extra=of_request(id))
            exchange.drop()


def stream_to(task: RequestTask, writer: BodyWriter) -> None:
    """Write the task's bytes at the end of the step that makes them, after those already buffered."""
    task.on_bytes = writer.pull
    writer.pull(task)


async def _start_stream(scope: Scope, send: Send, task: RequestTask, ignored: Headers) -> None:
    extra = [(b"cache-control", b"no-cache"), AS_IT_COMES, *encoded(task.dialect_headers()), *ignored]
    await send_start(scope, send, 200, task.content_type, extra)


async def _end_of(writer: BodyWriter, exchange: AnyExchange, sign: bytes) -> None:
    """Wait until a stream has ended, or its client is gone; long pauses get keep-alives."""
    while not (exchange.is_over or writer.broken):
        patience = None
        if sign and not writer.ended:
            patience = KEEP_ALIVE - (time.monotonic() - exchange.written_at)
            if patience <= 0:
                writer.write(sign)
                patience = KEEP_ALIVE
        await exchange.wait(patience)
