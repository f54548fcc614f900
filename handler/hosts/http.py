"""The embedded server's routes: DJL Serving's, as plain ASGI (contract djl.md, section 2).

Starlette routes and nothing more: its wrappers around `send` would cost each streamed chunk more than all else here.
"""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from handler.errors import InternalError, ServingError
from handler.hosts.adapter_routes import AdapterRoutes
from handler.hosts.asgi import Endpoint, read_body, send_answer, send_error, send_json, send_start
from handler.hosts.body import BodyWriter, WholeBody
from handler.hosts.intake import ignored_header, request_id
from handler.hosts.protocol import CHUNK
from handler.hosts.service import Service
from handler.schemas.base import Answer

log = logging.getLogger("handler.http")


class App:
    """The ASGI application around a Service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        invoke = Endpoint({"POST": self._invoke})
        self._router = Router(
            [
                Route("/invocations", invoke),
                Route("/predictions/{model}", invoke),
                Route("/predictions/{model}/{version}", invoke),
                Route("/models/{model}/invoke", invoke),
                Route("/ping", Endpoint({"GET": self._ping})),
                Route("/models", Endpoint({"GET": self._models})),
                Route("/models/{model}", Endpoint({"GET": self._model})),
                Route("/metrics", Endpoint({"GET": self._metrics})),
                *AdapterRoutes(service).routes,
            ],
            default=_not_found,
            redirect_slashes=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server runs without lifespan and websockets"
        headers = scope["headers_by_name"] = _headers(scope)
        scope["request_id"] = request_id(headers)
        await self._router(scope, receive, send)

    # -- inference -----------------------------------------------------------------------------------------------

    async def _invoke(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._knows_model(scope):
            return await _model_not_found(scope, send)
        self._service.num_requests += 1
        try:
            await self._answer(scope, receive, send)
        finally:
            self._service.num_requests -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, config = self._service, self._service.config
        try:
            headers = scope["headers_by_name"]
            service.intake.check_headers(headers)
            service.check_room()
            body = await read_body(scope, receive, config.max_request_size, config.client_timeout)
            if body is None:
                return None
            service.check_room()  # the body may have taken its time
            call = await service.read(body, headers)
        except ServingError as error:
            return await self._refuse(scope, send, error)
        except Exception as error:
            log.exception("id=%s: a bug", scope["request_id"])
            return await self._refuse(scope, send, InternalError.of(error))
        exchange = service.exchange(call, scope["request_id"])
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait((exchange.begun, gone), return_when=asyncio.FIRST_COMPLETED)
            if not exchange.begun.done():
                return None
            extra = [(name.encode(), value.encode()) for name, value in ignored_header(call.ignored).items()]
            if exchange.answer is not None:
                await send_answer(scope, send, exchange.answer, extra)
            elif scope["http_version"] == "1.0":  # it knows no chunks: the stream in one piece
                whole = WholeBody()
                exchange.stream_to(whole)
                await asyncio.wait((whole.done, gone), return_when=asyncio.FIRST_COMPLETED)
                if whole.done.done():
                    await send_answer(scope, send, Answer(200, call.reply.content_type, whole.body), extra)
            else:
                extra = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"), *extra]
                await send_start(scope, send, 200, call.reply.content_type, extra)
                writer = BodyWriter(send, scope["extensions"][CHUNK])
                exchange.stream_to(writer)
                # `gone` also comes when the response is complete
                await asyncio.wait((gone, writer.broken), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            exchange.cancel()

    async def _refuse(self, scope: Scope, send: Send, error: ServingError) -> None:
        """Answer a request that never reached the engine."""
        await send_answer(scope, send, self._service.refuse(error, scope["request_id"]))

    def _knows_model(self, scope: Scope) -> bool:
        parameters = scope["path_params"]
        name, version = parameters.get("model"), parameters.get("version", "1")
        return name in (None, self._service.config.model_name) and version == "1"

    # -- state ---------------------------------------------------------------------------------------------------

    async def _ping(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        value = {"status": "Healthy" if service.healthy else "Unhealthy", "state": service.state}
        if service.reason:
            value["reason"] = service.reason
        await send_json(scope, send, 200 if service.healthy else 503, value)

    async def _models(self, scope: Scope, receive: Receive, send: Send) -> None:
        config = self._service.config
        value = {"modelName": config.model_name, "modelUrl": config.model_id, "status": self._status()}
        await send_json(scope, send, 200, {"models": [value]})

    async def _model(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._knows_model(scope):
            return await _model_not_found(scope, send)
        service, config = self._service, self._service.config
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(service.started_at))
        worker = {"id": 1, "startTime": started, "status": self._status()}
        description = {
            "modelName": config.model_name,
            "modelUrl": config.model_id,
            "engine": service.info.name if service.info else config.llm_engine,
            "batchSize": config.batch_size,
            "maxBatchDelayMillis": config.max_batch_delay,
            "queueSize": config.job_queue_size,
            "requestInQueue": service.num_queued,
            "status": self._status(),
            "loadedAtStartup": True,
            "workerGroups": [
                {"device": {"deviceType": "cpu", "deviceId": -1}, "minWorkers": 1, "maxWorkers": 1, "workers": [worker]}
            ],
        }
        return await send_json(scope, send, 200, [{"modelName": config.model_name, "models": [description]}])

    def _status(self) -> str:
        return {"ready": "READY", "loading": "PENDING", "restarting": "PENDING"}.get(self._service.state, "UNLOADED")

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics = self._service.metrics
        await send_answer(scope, send, Answer(200, metrics.content_type, metrics.render()))


# -- requests ----------------------------------------------------------------------------------------------------


def _headers(scope: Scope) -> dict[str, str]:
    """The first of each name counts."""
    return {key.decode("latin-1"): value.decode("latin-1") for key, value in reversed(scope["headers"])}


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# -- answers -----------------------------------------------------------------------------------------------------


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    message = "Requested resource is not found, please refer to API document."
    await send_error(scope, send, 404, "ResourceNotFoundException", message)


async def _model_not_found(scope: Scope, send: Send) -> None:
    await send_error(scope, send, 404, "ModelNotFoundException", f"Model not found: {scope['path_params']['model']}")
