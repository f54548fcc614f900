"""The inference routes. They read a request, and send its response until it ends or the client disconnects."""

from __future__ import annotations

import asyncio
import logging
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from http import HTTPStatus
from typing import Any, cast

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from handler.core.errors import (
    MethodNotAllowed,
    ModelNotFound,
    Overloaded,
    ServingError,
    TooLarge,
    TooSlow,
    UpgradeRequired,
)
from handler.core.framing import dumps
from handler.core.log import of_request
from handler.core.loop import start_now, wait_for
from handler.core.numbers import is_digits
from handler.http.exchange import EXCHANGE, AnyExchange
from handler.http.urls import query_of
from handler.protocols.kernel.dialect import Dialect
from handler.protocols.kernel.errors import SERVER, ErrorFormat, HttpResponse, retry_headers
from handler.serving.compression import check_encoding, content_encoding, inflate
from handler.serving.head import ATTRIBUTES, DETACHES, PATH_MODEL, QUERY_ADAPTER, in_attributes, owner_of
from handler.serving.model import ServedModel
from handler.serving.quota import BODY_MEMORY, Share
from handler.serving.request.life import CLOSED, COMMIT
from handler.serving.request.task import RequestTask, ignored_header

log = logging.getLogger("handler.server")

Headers = list[tuple[bytes, bytes]]
Handle = Callable[[Scope, Receive, Send], Awaitable[None]]

Responded = tuple[Any, Sequence[str]]
"""The JSON value of a response, and the names of the ignored parameters."""

SHARED = "shared_headers"
"""Scope key for headers to add to every response to the request. This is cheaper than a wrapper around `send`."""
AS_IT_COMES = (b"x-accel-buffering", b"no")
"""Header that makes nginx forward each chunk of a stream immediately. nginx does not forward the header itself."""
KEEP_ALIVE = 15.0  # seconds of silence after which a stream sends a keep-alive, if its dialect has one
_MOST_OF_PATH = 200  # maximum characters of a path in the log
_MOST_DIGITS = 18  # digits of a Content-Length that are read; no real body is longer
OVER_SOCKET = "over_socket"
"""Scope key of a request that is a message of a WebSocket."""
GIVEN_UP = "body_given_up"
"""Scope key of a request whose remaining body is not read. The connection is closed after the response."""


_LISTS: Mapping[str, str] = {
    **dict.fromkeys(
        ("accept", "accept-encoding", "access-control-request-headers", "content-encoding", "if-none-match"), ", "
    ),
    ATTRIBUTES: ";",
}
"""Maps headers with lists to their separators (RFC 9110, section 5.3; DJL Serving for SageMaker's attributes)."""


def headers_by_name(scope: Scope) -> dict[str, str]:
    """Return the request headers by name.

    If a header is repeated, lists are joined. For any other header, the first value is used.
    """
    pairs = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in scope["headers"]]
    headers = dict(reversed(pairs))
    if len(headers) < len(pairs):
        for name in headers.keys() & _LISTS.keys():
            headers[name] = _LISTS[name].join(value for key, value in pairs if key == name)
    return headers


@dataclass(frozen=True)
class Endpoint:
    """An ASGI application that calls the handler of the route for the request method.

    Attributes:
        handlers: handlers by method.
        errors: format of the errors for other methods and for requests without an API key. None selects the format of
            the server itself.
        socket: handler of requests that open a WebSocket, or None if the route has none.
    """

    handlers: Mapping[str, Handle]
    errors: ErrorFormat | None = None
    socket: Handle | None = None

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        method = scope["method"]
        handle = self.handlers.get("GET" if method == "HEAD" else method)
        if handle is not None:
            return handle(scope, receive, send)
        if method == "OPTIONS":
            return send_json(scope, send, 200, {})
        is_offer = offers_websocket(scope)
        if is_offer and self.socket is not None:
            return self.socket(scope, receive, send)
        return self._refuse(scope, send, is_offer=is_offer)

    async def _refuse(self, scope: Scope, send: Send, *, is_offer: bool) -> None:
        if is_offer or not self.handlers:
            message = "this route has no WebSocket" if is_offer else "this route can only be used over a WebSocket"
            response = (self.errors or SERVER).whole(UpgradeRequired(message))
            return await send_refusal(scope, send, response, [(b"upgrade", b"websocket"), (b"connection", b"upgrade")])
        error = MethodNotAllowed("Request method is not allowed, please refer to API document.")
        allowed = [name for method in self.handlers for name in (method, *(("HEAD",) if method == "GET" else ()))]
        allow = [(b"allow", ", ".join(allowed).encode())]
        await send_refusal(scope, send, (self.errors or SERVER).whole(error), allow)


def offers_websocket(scope: Scope) -> bool:
    """Return whether a request offers to open a WebSocket."""
    offer: str = scope["headers_by_name"].get("upgrade", "")
    if offer.strip().lower() != "websocket":
        return False
    return bool(scope["method"] == "GET" and scope["http_version"] == "1.1")


async def read_body(
    scope: Scope, receive: Receive, limit: int, model: ServedModel, memory: Share | None = None
) -> bytes:
    """Return the request body.

    Args:
        limit: maximum size of the body, in bytes.
        model: model to which the request is sent. A graceful stop of the model does not wait for the body.
        memory: share of the memory quota that grows as the body is received. If it is None, the memory is released when
            this call returns, because the caller needs the body only briefly.

    Raises:
        TooLarge: the body is larger than `limit`.
        TooSlow: the body was not received in time.
        Overloaded: there is not enough memory for the body.
        ClientDisconnect: the client has disconnected.
    """
    option = " (max_request_size)" if limit == model.config.max_request_size else ""
    memory = memory or Share(model.admission.memory.of(owner_of(scope["headers_by_name"])))
    if (length := declared_length(scope)) > limit:
        scope[GIVEN_UP] = True
        raise TooLarge(f"the body has {length} bytes; at most {limit} are allowed{option}")
    body: bytes | None = scope["extensions"][EXCHANGE].take_body()
    if body is not None:  # it was received together with the head
        _count(len(body), len(body), limit, memory, option)
        return body
    receiving = start_now(_receive_body(scope, receive, limit, memory, option))
    if receiving.done():
        return receiving.result()
    seconds = model.config.client_timeout
    try:
        with model.receiving:
            return await wait_for(receiving, seconds)
    except asyncio.TimeoutError:
        scope[GIVEN_UP] = True
        raise TooSlow(f"the body did not arrive within {seconds:g} s (option.client_timeout)") from None


async def read_short_body(scope: Scope, receive: Receive, limit: int, model: ServedModel) -> bytes:
    """Return a request body without its Content-Encoding, for routes whose bodies are too short to need a thread.

    Args:
        limit: maximum size in bytes of the body, compressed and decompressed.
        model: model to which the request is sent. A graceful stop of the model does not wait for the body.

    Raises:
        ServingError: the body cannot be read (see `read_body`), or cannot be decompressed.
        ClientDisconnect: the client has disconnected.
    """
    encoding = content_encoding(scope["headers_by_name"])
    check_encoding(encoding)
    body = await read_body(scope, receive, limit, model)
    return b"".join(inflate(body, encoding, limit)) if encoding else body


async def decode_short_body(scope: Scope, body: bytes, model: ServedModel) -> Any:
    """Return the value of a JSON body that `read_short_body` has read.

    Raises:
        ServingError: the body is not valid JSON or contains too much data, or there is not enough memory.
    """
    owner = owner_of(scope["headers_by_name"])
    with Share(model.admission.memory.of(owner)) as memory:
        return await model.admission.decode(body, memory.set, owner)


def declared_length(scope: Scope) -> int:
    """Return the value of the Content-Length header, or 0 if the header is missing or invalid."""
    length: str = scope["headers_by_name"].get("content-length", "").lstrip("0")
    return int(length[:_MOST_DIGITS]) if is_digits(length) else 0


async def _receive_body(scope: Scope, receive: Receive, limit: int, memory: Share, option: str) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        size += len(part)
        more = message.get("more_body", False)
        try:
            _count(len(part), size, limit, memory, option)
        except ServingError:
            parts.clear()
            if more:
                scope[GIVEN_UP] = True
            raise
        parts.append(part)
        if not more:
            return b"".join(parts)


def _count(size: int, total: int, limit: int, memory: Share, option: str) -> None:
    """Take memory for a part of a body.

    Args:
        size: size of the part, in bytes.
        total: size of all parts so far, in bytes.

    Raises:
        ServingError: the body is too large, or there is not enough memory. Then the memory of all parts is given back.
    """
    try:
        if total > limit:
            raise TooLarge(f"the body has more than {limit} bytes{option}")
        memory.take(BODY_MEMORY * size)
    except ServingError:
        memory.give_back()  # immediately, so that another request can use it
        raise


def again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` function that first returns a body that was already read, then calls `receive`."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


async def send_start(
    scope: Scope, send: Send, status: int, content_type: str, extra: Headers, retry_after: float = 0.0
) -> None:
    headers = [
        (b"content-type", content_type.encode()),
        (b"x-request-id", scope["request_id"].encode()),
        *scope.get(SHARED, ()),
        *(encoded(retry_headers(status, retry_after)) if status >= HTTPStatus.BAD_REQUEST else ()),
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


def shows(value_of: Callable[[Scope], Any]) -> Handle:
    """Return a handler that responds with a value as JSON."""

    async def show(scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(scope, send, 200, value_of(scope))

    return show


async def send_error(scope: Scope, send: Send, error: ServingError) -> None:
    """Send an error in the format of the server itself, for requests that belong to no dialect."""
    await send_refusal(scope, send, SERVER.whole(error))


async def send_refusal(scope: Scope, send: Send, answer: HttpResponse, extra: Headers | None = None) -> None:
    """Send an error response and log it. Inference requests have log lines of their own and do not need this."""
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
"""Maximum number of bytes to buffer for a client that reads too slowly. A client that exceeds it is disconnected."""


class Writing(IntEnum):
    """The phase of a `BodyWriter`, in order.

    Attributes:
        OPEN: more chunks may follow.
        ENDED: the last chunk has been written.
        BROKEN: the connection is no longer writable.
        OVERFLOWED: the client was disconnected, because it read too slowly.
    """

    OPEN = 0
    ENDED = 1
    BROKEN = 2
    OVERFLOWED = 3


class BodyWriter:
    """A writer that sends chunks in order: immediately, or from a task while the client reads too slowly.

    ASGI's `send` is a coroutine, but it waits only when the socket is full. The writer therefore steps the coroutine by
    hand, which costs a fraction of waking a task. If the coroutine waits, a task completes it, and then sends the
    chunks that have been written in the meantime. If a client stops reading, the kernel closes the connection
    (`http/server.py`).

    Args:
        channel: connection that accepts chunks while none are buffered in the writer.
        set_unsent: called with the number of bytes buffered for the client. It raises Overloaded if too many bytes
            are buffered for all clients together.

    Attributes:
        phase: current phase.
    """

    def __init__(self, send: Send, channel: AnyExchange, set_unsent: Callable[[int], object] = bool) -> None:
        self._send = send
        self._channel = channel
        self._set_unsent = set_unsent
        self._backlog: list[bytes] = []
        self._size = 0
        self._task: asyncio.Task[None] | None = None
        self.phase = Writing.OPEN

    def pull(self, task: RequestTask) -> None:
        """Write the bytes that the task has produced since the last call."""
        data, last = task.take(), task.finished
        try:
            if not last and self._channel.write_chunk(data):
                return
        except Exception:  # the connection is closed, but this has not been reported yet
            return self._break()
        self.write(data, last=last)

    def write(self, data: bytes, *, last: bool = False) -> None:
        self._channel.written_at = time.monotonic()
        if self.phase >= Writing.BROKEN:
            return
        if last:
            self.phase = Writing.ENDED
        if self._task is not None:
            self._backlog.append(data)
            self._size += len(data)
            return self._count()
        try:
            message = {"type": "http.response.body", "body": data, "more_body": not last}
            sending = cast(Coroutine[Any, Any, None], self._send(message))
            waiting = sending.send(None)
        except StopIteration:
            self._channel.is_paused = True
            if not last:
                self._channel.resume()
            return self._count()
        except (OSError, RuntimeError):  # the connection is closed, but this has not been reported yet
            self._break()
            return
        self._channel.is_paused = True
        self._size = len(data)
        self._task = asyncio.ensure_future(self._catch_up(sending, waiting, len(data)))
        self._count()

    def _note_sent(self, size: int) -> None:
        self._size -= size
        if self.phase < Writing.BROKEN:
            self._count()

    def _count(self) -> None:
        """Count the bytes that are buffered for the client, and disconnect it if there are too many."""
        try:
            self._set_unsent(self._size + self._channel.num_unsent)
        except Overloaded:
            return self._break(Writing.OVERFLOWED)
        if self._size > _MAX_BACKLOG:
            self._break(Writing.OVERFLOWED)

    def _break(self, phase: Writing = Writing.BROKEN) -> None:
        self._channel.is_paused = True
        self._backlog.clear()
        if self.phase < Writing.BROKEN:
            self.phase = phase
            self._channel.wake()

    def close(self) -> None:
        """Stop writing, and drop the bytes that have not been written."""
        self._break()
        if self._task is not None:
            self._task.cancel()

    async def _catch_up(self, sending: Coroutine[Any, Any, None], waiting: Any, size: int) -> None:
        try:
            await _go_on(sending, waiting)
            self._note_sent(size)
            while self._backlog:
                data = b"".join(self._backlog)
                self._backlog.clear()
                await self._send({"type": "http.response.body", "body": data, "more_body": self.phase < Writing.ENDED})
                self._note_sent(len(data))
        except (OSError, RuntimeError):  # the connection was closed in the meantime
            self._break()
        finally:
            self._task = None
            if self.phase < Writing.ENDED:
                self._channel.resume()


@types.coroutine
def _go_on(coroutine: Coroutine[Any, Any, None], waiting: Any) -> Generator[Any, Any, None]:
    """Await the rest of a coroutine that has already been stepped to its first wait.

    Args:
        waiting: value that the coroutine has yielded at this wait.
    """
    yield waiting
    yield from coroutine


Respond = Callable[[Scope, Send], Awaitable[None]]

Detach = Callable[[ServedModel, RequestTask], Awaitable[Respond | None]]
"""Starts a response in the background, and takes over closing the task. Returns a function that responds to the
request, or None if the task has been refused.
"""


class Inference:
    """An ASGI application for a route that does inference.

    Args:
        dialect: dialect of the route, or None for the configured dialect.
        detach: responds to a request for a background response, or None if the route has no such responses.

    Attributes:
        is_configured: whether the route uses the configured dialect. If so, it also accepts calls that manage sessions.
    """

    def __init__(self, model: ServedModel, dialect: Dialect | None = None, detach: Detach | None = None) -> None:
        self._model = model
        self._detach = detach
        self._dialect = dialect
        self.is_configured = dialect is None

    @property
    def dialect(self) -> Dialect:
        return self._dialect or self._model.preprocessor.dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: AnyExchange = scope["extensions"][EXCHANGE]
        task, respond = self._open(scope, exchange), None
        try:
            await self._parse(scope, receive, task)
            if task.parsed is not None and not exchange.is_over:  # the client may have disconnected in the meantime
                if task.parsed.detached is None or self._detach is None:
                    return await self._respond(scope, send, task, exchange)
                respond = await self._detach(self._model, task)
            if task.error is not None and respond is None:
                await send_answer(scope, send, task.take_whole())
        finally:
            if respond is None:
                task.close()
        del task  # a slow client must not keep it in memory
        if respond is not None:
            await respond(scope, send)

    async def _respond(self, scope: Scope, send: Send, task: RequestTask, exchange: AnyExchange) -> None:
        """Run a request, and send its response."""
        if not task.streams:
            exchange.send_whole()
        task.begin(task.run())
        await _ResponseSender(scope, send, task, exchange).send()
        await exchange.read()  # the response needs memory until then

    def refused(self, error: ServingError, request_id: str) -> HttpResponse:
        """Return the error response of the dialect for a request that is refused before it is read, and count it."""
        with self._model.refused(error, self._dialect, id=request_id) as task:
            return task.take_whole()

    def _open(self, scope: Scope, exchange: AnyExchange) -> RequestTask:
        """Create the task of a request, which wakes `exchange` when there is something to send."""
        wake = exchange.wake

        def on_bytes(task: RequestTask) -> None:
            if task.unsent or task.finished:
                wake()

        names, id = scope["path_params"], scope["request_id"]
        name, version = names.get("model"), names.get("version", "1")
        own = self._model.config.model_name
        if name not in (None, *own) or version != "1":
            return self._model.refused(ModelNotFound(name or "", version, served=own), self._dialect, id=id)
        headers = scope["headers_by_name"]
        if name not in (None, own[0]):
            headers = {**headers, PATH_MODEL: name}
        try:
            adapter = dict(query_of(scope)).get("adapter") if scope["query_string"] else None
        except ServingError as error:
            return self._model.refused(error, self._dialect, id=id)
        if adapter:
            headers = {**headers, QUERY_ADAPTER: adapter}
        if self._detach is not None and OVER_SOCKET not in scope and in_attributes(headers, "route") is None:
            headers = {**headers, DETACHES: ""}
        return self._model.open(headers, self._dialect, path=path_of(scope), id=id, on_bytes=on_bytes)

    async def _parse(self, scope: Scope, receive: Receive, task: RequestTask) -> None:
        """Read and parse the body. The body is not retained while the response is sent."""
        if task.finished:
            return
        try:
            had_body = scope["extensions"][EXCHANGE].has_body
            body = await read_body(scope, receive, self._model.config.max_request_size, self._model, task.memory)
            if not had_body:  # the queue may have filled up while the body was received
                self._model.check_room(owner_of(scope["headers_by_name"]))
            parsing = task.begin(task.parse(body))  # from here on the request is answered even after SIGTERM
            if parsing is not None:
                await _while_connected(parsing, scope["extensions"][EXCHANGE])
        except ServingError as error:
            task.refuse(error)
        except ClientDisconnect:
            pass


async def _while_connected(work: asyncio.Task[None], exchange: AnyExchange) -> None:
    """Wait until the work has ended or the client has disconnected."""
    work.add_done_callback(lambda _: exchange.wake())
    while not (work.done() or exchange.is_over):
        await exchange.wait()


def path_of(scope: Scope) -> str:
    """Return the path of a request with its query string."""
    query = scope["query_string"]
    return f"{scope['path']}?{query.decode('latin-1')}" if query else str(scope["path"])


class _ResponseSender:
    """Sends a response as it is generated, until it is complete or the client has disconnected."""

    def __init__(self, scope: Scope, send: Send, task: RequestTask, exchange: AnyExchange) -> None:
        self._scope, self._send, self._task, self._exchange = scope, send, task, exchange
        self._ignored = encoded(ignored_header(task.ignored).items())
        self._started = False  # whether keep-alives have begun a stream

    async def send(self) -> None:
        if not await self._has_begun():
            return
        if self._task.streams:
            await self._send_stream()
        else:
            await send_answer(self._scope, self._send, self._task.take_whole(), self._ignored)

    async def _has_begun(self) -> bool:
        """Wait for the first bytes, and send keep-alives until then. Return false if the client has disconnected."""
        task, exchange, keep_alive = self._task, self._exchange, self._task.keep_alive
        written_at = time.monotonic()
        while not (task.unsent or task.finished):
            if exchange.is_over:
                return False
            silent = time.monotonic() - written_at
            if keep_alive and silent >= KEEP_ALIVE:
                await self._start_stream()
                await self._send({"type": "http.response.body", "body": keep_alive, "more_body": True})
                written_at, silent = time.monotonic(), 0.0
            await exchange.wait(KEEP_ALIVE - silent if keep_alive else None)
        return True

    async def _start_stream(self) -> None:
        if self._started:
            return
        self._started = True
        task = self._task
        task.on(COMMIT)  # an error ends the stream from now on
        extra = [(b"cache-control", b"no-cache"), AS_IT_COMES, *encoded(task.dialect_headers()), *self._ignored]
        await send_start(self._scope, self._send, 200, task.content_type, extra)

    async def _send_stream(self) -> None:
        await self._start_stream()
        task, exchange = self._task, self._exchange
        writer = BodyWriter(self._send, exchange, task.memory.set_unsent)
        task.hold(writer.close, CLOSED)
        task.on_bytes = writer.pull  # at the end of each step
        writer.pull(task)
        task.write_tokens_to(exchange)
        await _end_of(writer, exchange, task.keep_alive)
        if not exchange.is_over:  # the connection cannot be written to any more
            if writer.phase is Writing.OVERFLOWED:
                log_slow_client(self._scope)
            exchange.drop()


def log_slow_client(scope: Scope) -> None:
    """Log that a connection is closed because more bytes wait for its client than may be held."""
    id = scope["request_id"]
    log.info("request %s: the connection is closed because the client reads too slowly", id, extra=of_request(id))


async def _end_of(writer: BodyWriter, exchange: AnyExchange, keep_alive: bytes) -> None:
    """Wait until a stream has ended or its client has disconnected, and send keep-alives during long pauses."""
    while not (exchange.is_over or writer.phase >= Writing.BROKEN):
        patience = None
        if keep_alive and writer.phase < Writing.ENDED:
            patience = KEEP_ALIVE - (time.monotonic() - exchange.written_at)
            if patience <= 0:
                writer.write(keep_alive)
                patience = KEEP_ALIVE
        await exchange.wait(patience)
