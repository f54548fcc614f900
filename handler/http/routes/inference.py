"""Routes for inference: read a request, and write its answer until the last byte or until the client is gone."""

from __future__ import annotations

import asyncio
import time

from starlette.types import Receive, Scope, Send

from handler.core.errors import GenerationFailed, ModelNotFound, ServingError
from handler.http.asgi import Headers, read_body, send_answer, send_start
from handler.http.protocol import CHUNK, WHOLE
from handler.http.streaming import BodyWriter, WholeBody
from handler.protocols.base import HttpResponse, ParsedRequest, Schema
from handler.serving.model import ServedModel
from handler.serving.preprocess import ignored_header
from handler.serving.request_task import RequestTask

KEEP_ALIVE = 15.0  # seconds of silence after which a stream says that it is there, where its dialect does


class Inference:
    """An ASGI application.

    Args:
        schema: the route's own dialect; None: the configured one.
    """

    def __init__(self, model: ServedModel, schema: Schema | None = None) -> None:
        self._model = model
        self._schema = schema

    @property
    def schema(self) -> Schema:
        """The dialect of its bodies."""
        return self._schema or self._model.schema

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._model.num_requests += 1
        try:
            await self._answer(scope, receive, send)
        finally:
            self._model.num_requests -= 1

    def refused(self, error: ServingError, request_id: str) -> HttpResponse:
        """The dialect's answer to a request that was never put to the engine, which is counted."""
        return self._model.refused(error, self._schema, id=request_id).take_whole()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = self._open(scope, begun)
        await self._parse(scope, receive, task)
        parsed = task.parsed
        if parsed is None:
            if task.error is not None:  # else the client has gone
                await send_answer(scope, send, task.take_whole())
            return
        if not parsed.streams or scope["http_version"] == "1.0":
            scope["extensions"][WHOLE]()
        task.start()
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            await _send(scope, send, parsed, task, begun, gone)
        finally:
            gone.cancel()
            task.cancel()

    def _open(self, scope: Scope, begun: asyncio.Future[None]) -> RequestTask:
        """Begin a request; `begun` resolves when there is something to answer."""

        def on_bytes(task: RequestTask) -> None:
            if (task.unsent or task.finished) and not begun.done():
                begun.set_result(None)

        names, id = scope["path_params"], scope["request_id"]
        name, version = names.get("model"), names.get("version", "1")
        if name not in (None, self._model.config.model_name) or version != "1":
            return self._model.refused(ModelNotFound(name or "", version), self._schema, id=id)
        return self._model.open(scope["headers_by_name"], self._schema, id=id, on_bytes=on_bytes)

    async def _parse(self, scope: Scope, receive: Receive, task: RequestTask) -> None:
        """Read the body and parse it. It is not kept while the answer is sent."""
        if task.finished:
            return
        config = self._model.config
        try:
            body = await read_body(scope, receive, config.max_request_size, config.client_timeout)
            if body is not None:
                self._model.check_room()  # it may have taken its time
                await task.parse(body)  # what has come whole is answered, also at SIGTERM
        except ServingError as error:
            task.refuse(error)


async def _send(
    scope: Scope,
    send: Send,
    parsed: ParsedRequest,
    task: RequestTask,
    begun: asyncio.Future[None],
    gone: asyncio.Future[None],
) -> None:
    """Write a request's answer as it comes."""
    ignored = list(ignored_header(parsed.ignored).items())
    started = False
    while not begun.done() and not gone.done():
        patience = KEEP_ALIVE if parsed.keep_alive and scope["http_version"] != "1.0" else None
        done, _ = await asyncio.wait((begun, gone), timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            if not started:
                await _start_stream(scope, send, parsed, _bytes([*parsed.headers(None), *ignored]))
                started = True
            await send({"type": "http.response.body", "body": parsed.keep_alive, "more_body": True})
    if not begun.done():
        return
    if not task.streams:
        answer = task.take_whole()
        if started:  # what is refused now is the stream's end
            late = parsed.failed(task.error) if parsed.failed and task.error else answer.body
            await send({"type": "http.response.body", "body": late})
        else:
            await send_answer(scope, send, answer, _bytes([*task.dialect_headers(), *ignored]))
    elif scope["http_version"] == "1.0":  # it knows no chunks: the stream in one piece
        whole = WholeBody()
        stream_to(task, whole)
        await asyncio.wait((whole.done, gone), return_when=asyncio.FIRST_COMPLETED)
        if whole.done.done():
            body = whole.done.result()
            if body is None:
                error = GenerationFailed("the answer is too large to be sent whole; HTTP/1.1 has streams")
                return await send_answer(scope, send, parsed.reply.refused(error))
            answer = HttpResponse(200, task.content_type, body)
            await send_answer(scope, send, answer, _bytes([*task.dialect_headers(), *ignored]))
    else:
        if not started:
            await _start_stream(scope, send, parsed, _bytes([*task.dialect_headers(), *ignored]))
        writer = BodyWriter(send, scope["extensions"][CHUNK])
        stream_to(task, writer)
        task.write_tokens_to(writer.write_chunk)
        await _keep_alive(writer, gone, parsed.keep_alive)


def stream_to(task: RequestTask, writer: BodyWriter | WholeBody) -> None:
    """Have the task's bytes written in the call that makes them, first those that have gathered."""
    task.on_bytes = writer.pull
    writer.pull(task)


async def _start_stream(scope: Scope, send: Send, parsed: ParsedRequest, extra: Headers) -> None:
    extra = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"), *extra]
    await send_start(scope, send, 200, parsed.reply.content_type, extra)


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
