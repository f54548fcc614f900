"""Call LMI's `handle` of a user's model.py where DJL Serving would: on the routes of its front end for inference."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from starlette.types import ASGIApp, Receive, Scope, Send

from handler.core.errors import BadRequest, ServingError, UnsupportedMedia
from handler.http.asgi import AS_IT_COMES, SHARED, Headers, again, encoded, headers_by_name, left_of_body, send_error
from handler.http.exchange import EXCHANGE, AnyExchange
from handler.plugins.handle import Answer, Broken, Call, PassOn
from handler.serving.admission import INVOKE
from handler.serving.custom_handle import CustomHandle, close_parts
from handler.serving.model import ServedModel
from handler.serving.preprocess import ATTRIBUTES

T = TypeVar("T")

_ROUTES = (*INVOKE, "/v1/chat/completions")
_FORM = "application/x-www-form-urlencoded"
_MOST_FIELDS = 10_000
_WITHOUT_BODY = (204, 304)


class HandleRoutes:
    """An ASGI application: the function on its routes; on others, and for what it passes on, the server's own."""

    def __init__(self, handle: CustomHandle, model: ServedModel, app: ASGIApp) -> None:
        self._handle, self._model, self._app = handle, model, app
        self._paths = re.compile("|".join(re.sub(r"{(\w+)}", r"([^/]+)", path) for path in _ROUTES))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_called(scope):
            return await self._app(scope, receive, send)
        body = await left_of_body(receive)
        if body is None:
            return  # the client has gone
        try:
            call = self._call(scope, body)
            self._model.check_room()
        except ServingError as error:
            return await send_error(scope, send, error)
        exchange: AnyExchange = scope["extensions"][EXCHANGE]
        exchange.send_whole()  # a client that ends its side has gone
        result = await _unless_gone(self._handle.answer(call), exchange)
        if isinstance(result, PassOn):
            given = body if result.body is None else result.body
            return await self._app(scope, again(given, receive), send)
        if result is not None:
            try:
                await _send(scope, send, result, exchange)
            finally:
                close_parts(result)

    def _is_called(self, scope: Scope) -> bool:
        """Whether the path is one of the function's, and names this model."""
        match = self._paths.fullmatch(scope["path"]) if scope["method"] == "POST" else None
        if match is None or self._model.state in ("loading", "stopping"):
            return False
        name, *version = [part for part in match.groups() if part is not None] or [self._model.config.model_name]
        return name == self._model.config.model_name and version in ([], ["1"])

    def _call(self, scope: Scope, body: bytes) -> Call:
        """Return what the function gets: headers as properties; body, form and query as contents.

        Raises:
            ServingError: DJL Serving would refuse it too, or it cannot be read here.
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
        contents = _fields(scope["query_string"].decode("latin-1"))
        media = headers.get("content-type", "").partition(";")[0].strip().lower()
        if media.startswith("multipart/"):
            raise UnsupportedMedia(f"{media} is not read for handle of model.py: send a field as the body, or {_FORM}")
        if media == _FORM and not body.lstrip().startswith((b"{", b"[")):  # JSON of `curl -d`
            contents |= _fields(body.decode("latin-1"))
        elif body:
            contents["data"] = body
        return self._handle.request(contents, properties)


def _fields(text: str) -> dict[str, bytes]:
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS, errors="surrogateescape")
    except ValueError:
        raise BadRequest(f"the form has more than {_MOST_FIELDS} fields") from None
    return {name: value.encode(errors="surrogateescape") for name, value in pairs}


async def _unless_gone(work: Coroutine[Any, Any, T], exchange: AnyExchange) -> T | None:
    """Return the result; None where the client goes before it is there, which cancels the work."""
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


async def _send(scope: Scope, send: Send, answer: Answer, exchange: AnyExchange) -> None:
    """Write an answer as it comes, until the last part or until the client is gone."""
    parts, body = answer.parts, answer.body
    headers = _headers(scope, answer)
    if answer.status in _WITHOUT_BODY:
        body, parts = b"", None
    elif parts is None:
        headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    while parts is not None and (part := await _unless_gone(parts.next(), exchange)) is not None:
        if data := _bytes(part):
            await send({"type": "http.response.body", "body": data, "more_body": True})
    if parts is None or not exchange.is_over:
        await send({"type": "http.response.body", "body": body})


def _bytes(part: bytes | Broken) -> bytes:
    return part.body if isinstance(part, Broken) else part


def _headers(scope: Scope, answer: Answer) -> Headers:
    """Return the function's headers, and those of the server's own that it has not set."""
    given = encoded(answer.headers)
    names = {name for name, _ in given}
    own = [(b"x-request-id", scope["request_id"].encode()), *scope.get(SHARED, ())]
    if answer.parts is not None:
        own.append(AS_IT_COMES)
    return [*given, *(header for header in own if header[0].lower() not in names)]
