"""A route that answers requests of one dialect: from the headers to the last byte, or to the client's going away."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from starlette.types import Receive, Scope, Send

from handler.core.errors import GenerationFailed, InternalError, ModelNotFound, ServingError
from handler.http.asgi import Headers, read_body, send_answer, send_start
from handler.http.protocol import CHUNK, WHOLE
from handler.http.streaming import BodyWriter, WholeBody
from handler.protocols.base import HttpResponse, ParsedRequest, Schema
from handler.serving.preprocess import ignored_header
from handler.serving.request_task import Exchange
from handler.serving.service import Service

log = logging.getLogger("handler.http")

KEEP_ALIVE = 15.0  # seconds of silence after which a stream says that it is there, where its dialect does


class Inference:
    """An ASGI application.

    Args:
        schema: the route's own dialect; None: the configured one.
    """

    def __init__(self, service: Service, schema: Schema | None = None) -> None:
        self._service = service
        self._schema = schema

    @property
    def schema(self) -> Schema:
        """The dialect of its bodies."""
        return self._schema or self._service.schema

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._service.num_requests += 1
        try:
            await self._answer(scope, receive, send)
        finally:
            self._service.num_requests -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = await self._read(scope, receive, send)
        if call is None:
            return
        if not call.streams or scope["http_version"] == "1.0":
            scope["extensions"][WHOLE]()
        exchange = self._service.exchange(call, scope["request_id"])
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            await _send(scope, send, call, exchange, gone)
        finally:
            gone.cancel()
            exchange.cancel()

    async def _read(self, scope: Scope, receive: Receive, send: Send) -> ParsedRequest | None:
        """What is asked for; None where that has been refused, or the client has gone.

        The body and what was read from it are not kept while the answer is sent.
        """
        service, schema = self._service, self._schema
        body: Any = None
        try:
            self._check_model(scope)
            headers = scope["headers_by_name"]
            service.intake.check_headers(headers, schema)
            service.check_room()
            data = await read_body(scope, receive, service.config.max_request_size, service.config.client_timeout)
            if data is None:
                return None
            service.check_room()  # the body may have taken its time; what has come whole is answered, also at SIGTERM
            decoded = await service.decode(data, headers, schema)
            body = decoded.value
            return await service.parse(decoded, len(data), headers, schema)
        except ServingError as error:
            await self._refuse(scope, send, error, body)
        except Exception as error:
            log.exception("id=%s: a bug", scope["request_id"])
            await self._refuse(scope, send, InternalError.of(error), body)
        return None

    async def _refuse(self, scope: Scope, send: Send, error: ServingError, body: Any) -> None:
        await send_answer(scope, send, self.refused(error, scope["request_id"], body))

    def refused(self, error: ServingError, request_id: str, body: Any = None) -> HttpResponse:
        """The dialect's answer to a request that was never put to the engine, which is counted."""
        return self._service.refuse(error, request_id, body, self._schema)

    def _check_model(self, scope: Scope) -> None:
        parameters = scope["path_params"]
        name, version = parameters.get("model"), parameters.get("version", "1")
        if name not in (None, self._service.config.model_name) or version != "1":
            raise ModelNotFound(name or "", version)


async def _send(scope: Scope, send: Send, call: ParsedRequest, exchange: Exchange, gone: asyncio.Future[None]) -> None:
    """Write a call's answer as it comes."""
    ignored = list(ignored_header(call.ignored).items())
    started = False
    while not exchange.begun.done() and not gone.done():
        patience = KEEP_ALIVE if call.keep_alive and scope["http_version"] != "1.0" else None
        done, _ = await asyncio.wait((exchange.begun, gone), timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            if not started:
                await _start_stream(scope, send, call, _bytes([*call.headers(None), *ignored]))
                started = True
            await send({"type": "http.response.body", "body": call.keep_alive, "more_body": True})
    if not exchange.begun.done():
        return
    if exchange.answer is not None:
        if started:  # what is refused now is the stream's end
            late = call.failed(exchange.failure) if call.failed and exchange.failure else exchange.answer.body
            await send({"type": "http.response.body", "body": late})
        else:
            await send_answer(scope, send, exchange.answer, _bytes([*exchange.headers(), *ignored]))
    elif scope["http_version"] == "1.0":  # it knows no chunks: the stream in one piece
        whole = WholeBody()
        exchange.stream_to(whole)
        await asyncio.wait((whole.done, gone), return_when=asyncio.FIRST_COMPLETED)
        if whole.done.done():
            body = whole.done.result()
            if body is None:
                error = GenerationFailed("the answer is too large to be sent whole; HTTP/1.1 has streams")
                return await send_answer(scope, send, call.reply.refused(error))
            answer = HttpResponse(200, call.reply.content_type, body)
            await send_answer(scope, send, answer, _bytes([*exchange.headers(), *ignored]))
    else:
        if not started:
            await _start_stream(scope, send, call, _bytes([*exchange.headers(), *ignored]))
        writer = BodyWriter(send, scope["extensions"][CHUNK])
        exchange.stream_to(writer)
        await _keep_alive(writer, gone, call.keep_alive)


async def _start_stream(scope: Scope, send: Send, call: ParsedRequest, extra: Headers) -> None:
    extra = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"), *extra]
    await send_start(scope, send, 200, call.reply.content_type, extra)


async def _keep_alive(writer: BodyWriter, gone: asyncio.Future[None], sign: bytes) -> None:
    """Wait until a stream has ended: `gone` also comes when the response is complete."""
    over = (gone, writer.broken)
    while sign and not writer.ended:
        silent = time.monotonic() - writer.written_at
        if silent >= KEEP_ALIVE:
            writer.write(sign)
            silent = 0.0
        done, _ = await asyncio.wait(over, timeout=KEEP_ALIVE - silent, return_when=asyncio.FIRST_COMPLETED)
        if done:
            return
    await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _bytes(headers: list[tuple[str, str]]) -> Headers:
    return [(name.encode(), value.encode()) for name, value in headers]
