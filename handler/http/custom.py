"""User-defined handlers and middleware, which replace or wrap those of the server, as in AWS's vLLM image and LMI."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import http.client
import inspect
import json
import logging
import re
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from decimal import Decimal
from enum import Enum
from http import HTTPStatus
from pathlib import PurePath
from types import GeneratorType
from typing import Any, TypeVar
from urllib.parse import parse_qsl
from uuid import UUID

from starlette import background, concurrency, datastructures, exceptions, requests, responses, status
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from handler.config.config import Config
from handler.core.errors import BadRequest, InternalError, Overloaded, ServingError, UnsupportedMedia, error_text
from handler.core.log import of_request
from handler.core.numbers import is_digits
from handler.http.exchange import EXCHANGE, AnyExchange, AsgiExchange
from handler.http.inference import (
    AS_IT_COMES,
    SHARED,
    Headers,
    again,
    encoded,
    headers_by_name,
    log_slow_client,
    offers_websocket,
    read_body,
    send_error,
)
from handler.http.urls import query_of
from handler.plugins.aws import STANDARDS, Handlers
from handler.plugins.foreign_handlers import NO_VLLM_OBJECTS, missing
from handler.plugins.handle import Answer, Broken, PassOn
from handler.plugins.stand_ins import StandIn
from handler.plugins.stand_ins.djl import DJL_PYTHON
from handler.serving.admission import INVOKE
from handler.serving.head import ATTRIBUTES, OWNER, owner_of
from handler.serving.model import ServedModel
from handler.serving.quota import Share
from handler.serving.request.life import Life
from handler.serving.request.plan import HandleCall
from handler.serving.user_code import users_files

log = logging.getLogger("handler.server")

T = TypeVar("T")

_ROUTES = (*INVOKE, "/v1/chat/completions")
_FORM = "application/x-www-form-urlencoded"
_MOST_FIELDS = 10_000
_WITHOUT_BODY = (204, 304)
_HEADER_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_MOST_HELD = 1 << 24  # maximum size of a response to buffer, in bytes
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class HandleRoutes:
    """An ASGI application that calls `handle` of model.py on its routes.

    Requests for other routes, and requests that the function passes on, are handled by the server itself.
    """

    def __init__(self, handle: HandleCall, model: ServedModel, app: ASGIApp) -> None:
        self._handle = handle
        self._model = model
        self._app = app
        self._paths = re.compile("|".join(re.sub(r"{(\w+)}", r"([^/]+)", path) for path in _ROUTES))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_called(scope):
            return await self._app(scope, receive, send)
        try:
            body = await Request(scope, receive).body()  # the part that middleware has not read
        except ClientDisconnect:
            return
        try:
            contents, properties = _input_of(scope, body)
            owner = owner_of(scope["headers_by_name"])
            self._model.check_room(owner)
        except ServingError as error:
            return await send_error(scope, send, error)
        exchange: AnyExchange = scope["extensions"][EXCHANGE]
        exchange.send_whole()  # a client that half-closes the connection counts as disconnected
        with Life() as life:
            result = await _unless_gone(self._handle(contents, properties, life, owner), exchange)
            if isinstance(result, Answer):
                await _send(scope, send, result, exchange)
        if isinstance(result, PassOn):
            new_body = body if result.body is None else result.body
            await self._app(scope, again(new_body, receive), send)

    def _is_called(self, scope: Scope) -> bool:
        """Return whether the function serves this path, the path names this model, and the model is in service."""
        match = self._paths.fullmatch(scope["path"]) if scope["method"] == "POST" else None
        if match is None or self._model.availability.state in ("loading", "stopping"):
            return False
        name, *version = [part for part in match.groups() if part is not None] or [self._model.config.name]
        return name in self._model.config.model_name and version in ([], ["1"])


def _input_of(scope: Scope, body: bytes) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the contents and the properties of a call: the query with the form or the body, and the headers.

    Raises:
        ServingError: DJL Serving would reject the request, or its format is not supported.
    """
    headers = headers_by_name(scope)
    properties = {name: value for name, value in headers.items() if name != ATTRIBUTES}
    for pair in headers.get(ATTRIBUTES, "").split(";"):
        name, equals, value = pair.partition("=")
        if equals:
            properties[name.strip()] = value.strip()
    if "handler" in properties:
        raise BadRequest("The handler can't be overridden in a request")
    properties["requestId"] = scope["request_id"]
    contents = _encoded(query_of(scope, "surrogateescape"))
    media = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media.startswith("multipart/"):
        raise UnsupportedMedia(
            f"handle in model.py does not support content type {media}: send one value as the body, or {_FORM}"
        )
    if media == _FORM and not body.lstrip().startswith((b"{", b"[")):  # `curl -d` sends JSON as a form
        contents |= _fields(body.decode("latin-1"))
    elif body:
        contents["data"] = body
    return contents, properties


def _fields(text: str) -> dict[str, bytes]:
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS, errors="surrogateescape")
    except ValueError:
        raise BadRequest(f"the form has more than {_MOST_FIELDS} fields") from None
    return _encoded(pairs)


def _encoded(pairs: Iterable[tuple[str, str]]) -> dict[str, bytes]:
    return {name: value.encode(errors="surrogateescape") for name, value in pairs}


async def _unless_gone(work: Coroutine[Any, Any, T], exchange: AnyExchange) -> T | None:
    """Return the result of the work. If the client disconnects first, cancel the work and return None."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda _: exchange.wake())
    try:
        while not task.done():
            if exchange.is_over:
                return None
            await exchange.wait()
        return task.result()
    finally:
        task.cancel()
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody else reads the exception


async def _send(scope: Scope, send: Send, answer: Answer, exchange: AnyExchange) -> None:
    """Send a response part by part, until the last part has been sent or the client has disconnected."""
    parts, body = answer.parts, answer.body
    headers = _with_own(scope, encoded(answer.headers), is_sized=parts is None)
    if answer.status in _WITHOUT_BODY:
        body, parts = b"", None
    elif parts is None:
        headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    try:
        while parts is not None and (part := await _unless_gone(parts.next(), exchange)) is not None:
            if data := part.body if isinstance(part, Broken) else part:
                await send({"type": "http.response.body", "body": data, "more_body": True})
    except Overloaded:
        log_slow_client(scope)
        return exchange.drop()
    if parts is None or not exchange.is_over:
        await send({"type": "http.response.body", "body": body})


def _with_own(scope: Scope, headers: Headers, *, is_sized: bool) -> Headers:
    """Return the headers from a user function, and those server headers that the function has not set.

    Args:
        is_sized: whether the length of the body is known before it is sent.
    """
    names = {name.lower() for name, _ in headers}
    own = [(b"x-request-id", scope["request_id"].encode()), *scope.get(SHARED, ())]
    if not is_sized:
        own.append(AS_IT_COMES)
    return [*headers, *(header for header in own if header[0].lower() not in names)]


_RESPONSES = {name: value for name, value in vars(responses).items() if name.endswith("Response")}
FASTAPI = StandIn(
    {
        "fastapi": {
            "Request": Request, "Response": Response, "HTTPException": exceptions.HTTPException, "status": status,
            "BackgroundTasks": background.BackgroundTasks,
        },
        "fastapi.requests": {"Request": Request, "HTTPConnection": requests.HTTPConnection},
        "fastapi.responses": _RESPONSES,
        "fastapi.exceptions": {"HTTPException": exceptions.HTTPException},
        "fastapi.datastructures": {"Headers": datastructures.Headers, "State": datastructures.State},
        "fastapi.concurrency": {"run_in_threadpool": concurrency.run_in_threadpool},
    }
)  # fmt: skip
"""A stand-in for the parts of FastAPI that handlers import. Most of them are re-exported from Starlette."""


def missing_of(config: Config) -> list[str]:
    """Return warnings about imports in user files that are not available in this server."""
    return [message for path in users_files(config) for message in missing(path, (FASTAPI, STANDARDS, DJL_PYTHON))]


class _State(datastructures.State):
    """The value of `request.app.state`. It has the attributes that user code sets, but none of those that vLLM sets."""

    def __getattr__(self, key: str) -> Any:
        try:
            return super().__getattr__(key)
        except AttributeError as error:
            raise AttributeError(f"request.app.state.{key}: {NO_VLLM_OBJECTS}") from error


class CustomCode:
    """An ASGI application with user-defined handlers in front of the server routes, and middleware around both.

    An exception in user code ends only the request in which it was raised.

    Args:
        app: application of the server's routes.
    """

    def __init__(self, handlers: Handlers | None, model: ServedModel, app: ASGIApp) -> None:
        handlers = handlers or Handlers()
        self._model = model
        self._routes = app
        self.state = _State()
        pre_post = handlers.pre_post_process
        if pre_post is None and (handlers.pre or handlers.post):
            pre_post = _around(handlers.pre, handlers.post)
        if pre_post or handlers.throttle:
            app = _Plain(app)
        if (handle := model.admission.plan.call) is not None:
            app = HandleRoutes(handle, model, app)
        app = _contained(_Overrides(handlers, model, app))
        for middleware in filter(None, (pre_post, handlers.throttle)):
            is_class = isinstance(middleware, type)
            app = _contained(middleware(app) if is_class else BaseHTTPMiddleware(app, _dispatch(middleware)))
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if offers_websocket(scope):  # custom code is called for each message, because Starlette's handles only HTTP
            return await self._routes(scope, receive, send)
        # a graceful stop waits for it
        quota = self._model.admission.memory.of(owner_of(scope["headers_by_name"]))
        with self._model.adapters.calls, Share(quota) as memory:
            try:
                body = await read_body(scope, receive, self._model.config.max_request_size, self._model, memory)
            except ServingError as error:
                return await send_error(scope, send, error)
            except ClientDisconnect:
                return
            memory.set(len(body))
            await self._run(scope, again(body, receive), send)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        framed = _Framed(scope, send)
        scope["app"] = self
        try:
            await self._app(scope, receive, framed.send)
        except Exception as error:  # the user's code
            id = scope["request_id"]
            log.exception("request %s: custom code failed", id, extra=of_request(id))
            if not framed.begun:
                await send_error(scope, send, InternalError(f"custom code raised {_shown(error)}"))
            elif exchange := scope["extensions"].get(EXCHANGE):  # removed before background tasks run
                exchange.drop()


class _Framed:
    """Sends a custom response, and corrects the Content-Length that the user code has set.

    A response with a Content-Length is buffered until its end, or until its first `_MOST_HELD` bytes. Other responses
    are sent immediately.

    Attributes:
        begun: whether the start of the response has been sent.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self.begun = False
        self._start: Message | None = None  # None if it is not buffered
        self._lengths: list[bytes] = []
        self._parts, self._size = list[bytes](), 0
        self._has_body = scope["method"] != "HEAD"

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            return await self._take_start(message)
        if not self._has_body:
            message = {**message, "body": b""}
        if self._start is not None:
            self._parts.append(part := message.get("body", b""))
            self._size += len(part)
            ends = not message.get("more_body", False)
            if not ends and self._size <= _MOST_HELD:
                return
            await self._begin(self._start, self._length(self._size, ends=ends))
            message = {**message, "body": b"".join(self._parts)}
            self._start, self._parts = None, []
        await self._send(message)

    async def _take_start(self, start: Message) -> None:
        _check_start(start)
        headers = start.get("headers", ())
        self._lengths = [value for name, value in headers if name.lower() == b"content-length"]
        framing = (b"content-length", b"transfer-encoding")
        start = {**start, "headers": [header for header in headers if header[0].lower() not in framing]}
        if start["status"] in (204, 304):  # uvicorn would close the connection at a body
            self._has_body = False
        if self._has_body and self._lengths:
            self._start = start
        else:
            await self._begin(start, self._declared() if self._scope["method"] == "HEAD" else None)

    async def _begin(self, start: Message, length: int | None) -> None:
        self.begun = True
        if length is not None:
            start = {**start, "headers": [*start["headers"], (b"content-length", str(length).encode())]}
        await self._send(start)
        if self._has_body and length is None:
            self._scope["extensions"][EXCHANGE].send_head()  # as Starlette does: the first part may be late

    def _declared(self) -> int | None:
        """Return the Content-Length that the user code has set, or None if it is missing or invalid."""
        (value, *others) = self._lengths or (b"",)
        return int(value) if is_digits(value) and len(value) < 19 and not others else None

    def _length(self, size: int, *, ends: bool) -> int | None:
        """Return the Content-Length to send when `size` bytes are buffered, or None if it is unknown.

        Args:
            ends: whether the buffered bytes are the whole body.
        """
        declared = self._declared()
        if declared is not None and (size == declared or (size < declared and not ends)):
            return declared
        id = self._scope["request_id"]
        log.warning("request %s: custom code's Content-Length is wrong and is not sent", id, extra=of_request(id))
        return size if ends else None


def _check_start(start: Message) -> None:
    """Check the status and headers of a response, because uvicorn would close the connection if they are invalid.

    Raises:
        ValueError: the status or a header is not valid.
    """
    status = start["status"]
    if not isinstance(status, int) or not 200 <= status <= 599:
        raise ValueError(f"response status {str(status)[:100]} is not valid: it must be 200 to 599")
    for name, value in start.get("headers", ()):
        if not _HEADER_NAME.fullmatch(name) or _CONTROL.search(value):
            raise ValueError(f"the response header {name[:100]!r} has an invalid name or value")


class _Ended(Exception):
    """Raised in place of an exception in user code that would end the event loop of the server."""


@contextlib.contextmanager
def _alive() -> Iterator[None]:
    """Convert SystemExit and KeyboardInterrupt from user code, which would otherwise end the event loop."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as error:
        raise _Ended(_shown(error)) from error


def _contained(app: ASGIApp) -> ASGIApp:
    """Wrap an application with `_alive`, because middleware runs it in a separate task."""

    async def contained(scope: Scope, receive: Receive, send: Send) -> None:
        with _alive():
            await app(scope, receive, send)

    return contained


def _contain_parts(response: Response) -> Response:
    """Wrap the iterator of a streaming response with `_alive`, because Starlette runs it in a separate task."""
    if isinstance(response, StreamingResponse):
        response.body_iterator = _each(response.body_iterator)
    return response


async def _each(parts: AsyncIterable[Any]) -> AsyncIterator[Any]:
    with _alive():
        async for part in parts:
            yield part


class _Plain:
    """The server routes as a plain ASGI application without the `Exchange` extension, so that middleware sees every
    part of a response.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await Request(scope, receive).body()  # the part that other middleware has not read
        except ClientDisconnect:
            return await _answer_nobody(send)
        scope["extensions"][EXCHANGE].send_whole()  # as in AWS's image, a half-closed connection counts as disconnected
        receive = again(body, receive)
        started = False

        async def note_start(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        exchange = AsgiExchange(receive, note_start, scope["http_version"])
        extensions = {**scope["extensions"], EXCHANGE: exchange}
        owner = {OWNER: owner_of(scope["headers_by_name"])}
        inner = {**scope, "headers_by_name": {**headers_by_name(scope), **owner}, "extensions": extensions}
        try:
            await self._app(inner, receive, exchange.send)
            if not started:
                await _answer_nobody(send)
        finally:
            exchange.close()


async def _answer_nobody(send: Send) -> None:
    """Send an empty response for a client that has disconnected, because middleware fails without a response."""
    await send({"type": "http.response.start", "status": 499, "headers": []})
    await send({"type": "http.response.body", "body": b""})


class _Overrides:
    """An ASGI application with user-defined handlers for /invocations and /ping.

    While the model is loading or stopping, the server itself handles both routes.
    """

    def __init__(self, handlers: Handlers, model: ServedModel, app: ASGIApp) -> None:
        self._handlers = {("POST", "/invocations"): handlers.invoke, ("GET", "/ping"): handlers.ping}
        self._model = model
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get((scope["method"], scope["path"]))
        if handler is None or self._model.availability.state in ("loading", "stopping"):
            return await self._app(scope, receive, send)
        scope["extensions"][EXCHANGE].send_whole()  # as in AWS's image, a half-closed connection counts as disconnected

        async def send_with_own(message: Message) -> None:
            if message["type"] == "http.response.start":  # a handler may send one object for all requests
                headers = [*message.get("headers", ())]
                is_sized = any(name.lower() == b"content-length" for name, _ in headers)
                message = {**message, "headers": _with_own(scope, headers, is_sized=is_sized)}
            await send(message)

        response = await _answer(handler, Request(scope, receive, send))
        await response(scope, receive, send_with_own)


async def _answer(handler: Callable[..., Any], request: Request) -> Response:
    """Call a handler and convert its result to a response as FastAPI does. An exception becomes an error response."""
    try:
        arguments = (request,) if inspect.signature(handler).parameters else ()
        result = await _called(handler, *arguments)
        if isinstance(result, Response):
            return _contain_parts(result)
        return _Json(result)
    except exceptions.HTTPException as error:
        return _refused(error)
    except ServingError as error:
        return _failed(error.message, HTTPStatus(error.status).phrase, error.status)
    except Exception as error:
        name = getattr(handler, "__name__", type(handler).__name__)
        log.exception("custom handler %r failed", name)
        return _failed(f"custom handler {name!r} raised {_shown(error)}", "InternalServerError", 500)


class _Json(JSONResponse):
    """A JSON response that is encoded as in FastAPI."""

    def render(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)
        return text.encode()


def _plain(value: Any) -> Any:
    """Convert a value that is not serializable to JSON, as FastAPI's `jsonable_encoder` does.

    Raises:
        TypeError: the value cannot be converted.
        UnicodeDecodeError: the value is bytes that are not UTF-8.
    """
    if callable(dump := getattr(value, "model_dump", None)):
        return dump(mode="json")
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, set | frozenset | deque | GeneratorType):
        return list(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, UUID | PurePath):
        return str(value)
    if isinstance(value, Mapping) or hasattr(value, "__dict__"):  # a dataclass too
        return dict(value) if isinstance(value, Mapping) else vars(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _refused(error: exceptions.HTTPException) -> Response:
    """Return the response for an HTTPException that user code has raised."""
    phrase = http.client.responses.get(error.status_code, "")
    return _failed(error.detail, phrase, error.status_code, error.headers)


def _failed(message: Any, kind: str, status: int, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error response in vLLM's format, which AWS's image also uses for errors in handlers."""
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status, headers)


async def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function, and await it if it is a coroutine function. As in FastAPI, other functions run on a thread."""
    with _alive():
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
            return await function(*arguments)
        result = await concurrency.run_in_threadpool(function, *arguments)
        return await result if inspect.isawaitable(result) else result


def _around(pre: Callable[..., Any] | None, post: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return middleware that calls `pre` on the request and `post` on the response. If a function returns None, its
    argument is used unchanged.
    """

    async def combined_pre_post_process(request: Request, call_next: RequestResponseEndpoint) -> Response:
        try:
            if pre is not None:
                request = await _called(pre, request) or request
            response = await call_next(request)
            return response if post is None else await _called(post, response) or response
        except exceptions.HTTPException:  # it chooses the response's status, as AWS documents
            raise
        except Exception as error:
            log.exception("custom pre or post processing failed")
            what = "Internal server error in combined_pre_post_process middleware"
            return JSONResponse({"error": what, "message": str(error)}, 500)

    return combined_pre_post_process


def _dispatch(function: Callable[..., Any]) -> Callable[[Request, RequestResponseEndpoint], Any]:
    async def dispatch(request: Request, call_next: RequestResponseEndpoint) -> Response:
        try:
            with _alive():
                response: Response = await function(request, call_next)
        except exceptions.HTTPException as error:
            return _refused(error)
        return _contain_parts(response)

    return dispatch


def _shown(error: BaseException) -> str:
    if isinstance(error, _Ended):
        return str(error)
    return f"{type(error).__name__}: {error_text(error)}"[:500]
