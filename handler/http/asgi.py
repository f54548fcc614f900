"""Read a request's body within its limits, and send an answer: for every route."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from handler.core.errors import MethodNotAllowed, ServingError, TooLarge, TooSlow
from handler.core.event_loop import start_now
from handler.core.framing import dumps
from handler.protocols.kernel.errors import SERVER, ErrorFormat
from handler.protocols.kernel.http_response import HttpResponse, retry_headers
from handler.serving.model import ServedModel
from handler.serving.turns import Share

Headers = list[tuple[bytes, bytes]]
Handle = Callable[[Scope, Receive, Send], Awaitable[None]]

SHARED = "shared_headers"
"""Where the scope keeps what every answer to its request bears: cheaper than a wrapper around `send`."""
AS_IT_COMES = (b"x-accel-buffering", b"no")
"""Has nginx pass each part of a stream on at once, and keep the header to itself."""
_TIMES = 3
"""Bytes of memory for each of a body: what most are decoded to lies beside it. So one that has come whole is read."""
_GIVEN_UP = "body_given_up"
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
        await send_answer(scope, send, (self.errors or SERVER).whole(error), allow)


async def read_body(
    scope: Scope, receive: Receive, limit: int, model: ServedModel, memory: Share | None = None
) -> bytes | None:
    """The body, None when the client went away.

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
        scope[_GIVEN_UP] = True
        raise TooSlow(f"the body did not arrive within {seconds:g} s (option.client_timeout)") from None


async def _read_body(scope: Scope, receive: Receive, limit: int, memory: Share) -> bytes | None:
    length = scope["headers_by_name"].get("content-length", "").lstrip("0")
    if length.isdigit() and (len(length) > 18 or int(length) > limit):
        scope[_GIVEN_UP] = True
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
            memory.take(_TIMES * len(part))
        except ServingError:
            parts.clear()
            memory.give_back()  # at once: it is room for another one
            if more:
                scope[_GIVEN_UP] = True
            raise
        parts.append(part)
        if not more:
            return b"".join(parts)


def again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body that was read already, and then what comes."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


async def left_of_body(receive: Receive) -> bytes | None:
    """Read what middleware has left of a body, in its own task, as it must; None where the client has gone."""
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
    if _GIVEN_UP in scope:
        headers.append((b"connection", b"close"))
    await send_start(scope, send, answer.status, answer.content_type, headers, answer.retry_after)
    await send({"type": "http.response.body", "body": answer.body})


async def send_json(scope: Scope, send: Send, status: int, value: Any, extra: Headers | None = None) -> None:
    await send_answer(scope, send, HttpResponse(status, "application/json", dumps(value)), extra)


async def send_error(scope: Scope, send: Send, error: ServingError) -> None:
    """Refuse a request that no dialect answers."""
    await send_answer(scope, send, SERVER.whole(error))


def encoded(headers: Iterable[tuple[str, str]]) -> Headers:
    """Return headers as ASGI has them."""
    return [(name.encode(), value.encode()) for name, value in headers]
