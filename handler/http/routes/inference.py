"""Routes for inference: read a request, and write its answer until the last byte or until the client is gone."""

from __future__ import annotations

import logging
import time
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from handler.core.errors import ModelNotFound, ServingError
from handler.http.asgi import AS_IT_COMES, Headers, encoded, read_body, send_answer, send_start
from handler.http.exchange import EXCHANGE, AnyExchange
from handler.http.streaming import BodyWriter
from handler.protocols.kernel.base import Dialect
from handler.protocols.kernel.http_response import HttpResponse
from handler.serving.model import ServedModel
from handler.serving.preprocess import QUERY_ADAPTER, ignored_header
from handler.serving.request_task import RequestTask

log = logging.getLogger("handler.server")

KEEP_ALIVE = 15.0  # seconds of silence after which a stream says that it is there, where its dialect does


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
        """Whether its dialect is the configured one, whose routes take calls about sessions too."""
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
        """The dialect's answer to a request that was never put to the engine, which is counted."""
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
                log.info("request %s: the connection is closed: its client reads too slowly", scope["request_id"])
            exchange.drop()


def stream_to(task: RequestTask, writer: BodyWriter) -> None:
    """Have the task's bytes written in the call that makes them, first those that have gathered."""
    task.on_bytes = writer.pull
    writer.pull(task)


async def _start_stream(scope: Scope, send: Send, task: RequestTask, ignored: Headers) -> None:
    extra = [(b"cache-control", b"no-cache"), AS_IT_COMES, *encoded(task.dialect_headers()), *ignored]
    await send_start(scope, send, 200, task.content_type, extra)


async def _end_of(writer: BodyWriter, exchange: AnyExchange, sign: bytes) -> None:
    """Wait until a stream has ended, or its client is gone; in long silences the stream says that it is there."""
    while not (exchange.is_over or writer.broken):
        patience = None
        if sign and not writer.ended:
            patience = KEEP_ALIVE - (time.monotonic() - exchange.written_at)
            if patience <= 0:
                writer.write(sign)
                patience = KEEP_ALIVE
        await exchange.wait(patience)
