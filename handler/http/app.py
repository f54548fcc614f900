"""The embedded server's routes: DJL Serving's (contract djl.md, section 2) and those of the other dialects.

Starlette routes and nothing more: its wrappers around `send` would cost each streamed chunk more than all else here.
"""

from __future__ import annotations

import re
import time

from starlette.routing import Match, Route, Router
from starlette.types import Receive, Scope, Send

from handler.core.errors import InvalidPayload
from handler.http.asgi import Endpoint, send_answer, send_error, send_json
from handler.http.routes.adapters import AdapterRoutes
from handler.http.routes.inference import Inference
from handler.http.routes.openai import OpenAiRoutes
from handler.http.routes.pages import OPEN_PATHS, PageRoutes
from handler.http.routes.tgi import TgiRoutes
from handler.http.routes.triton import TritonRoutes
from handler.http.security.access import OPEN, Access
from handler.http.security.allowed_hosts import AllowedHosts
from handler.http.security.api_keys import Lock
from handler.http.security.cors import Cors
from handler.protocols.base import HttpResponse
from handler.serving.preprocess import request_id
from handler.serving.route_override import INVOKE
from handler.serving.service import Service

_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
_ROUTE = re.compile(r"(?:^|[\s,;])route=([^\s,;]*)")
"""SageMaker forwards to /invocations only; AWS's images let this header name another route (sagemaker.md, 1.1)."""


class App:
    """The ASGI application around a Service.

    Args:
        access: who may speak to it.
        hosts: by which it may be called.
    """

    def __init__(self, service: Service, access: Access = OPEN, hosts: AllowedHosts | None = None) -> None:
        self._service = service
        self._hosts = hosts or AllowedHosts(None)
        invoke = Endpoint({"POST": Inference(service)})
        page = PageRoutes(service, lambda: self.routes, locked=bool(access.keys))
        own = [
            Route(path, Endpoint({"POST": Inference(service, schema), **page.beside(path)}, refused=schema.refused))
            for path, schema in service.intake.routes.items()
        ]
        self._inference = [*[Route(path, invoke) for path in INVOKE], *own]
        self.routes = [
            *self._inference,
            *page.routes,
            Route("/ping", Endpoint({"GET": self._ping})),
            Route("/models", Endpoint({"GET": self._models})),
            Route("/models/{model}", Endpoint({"GET": self._model})),
            Route("/metrics", Endpoint({"GET": self._metrics})),
            *AdapterRoutes(service).routes,
            *TgiRoutes(service).routes,
            *OpenAiRoutes(service).routes,
            *TritonRoutes(service).routes,
        ]
        self._router = Router(self.routes, default=_not_found, redirect_slashes=False)
        self._lock = Lock(access.keys, {("GET", "/ping"), ("GET", "/health"), *OPEN_PATHS})
        self._cors = Cors(access.origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server runs without lifespan and websockets"
        headers = scope["headers_by_name"] = _headers(scope)
        scope["request_id"] = request_id(headers)
        host = headers.get("host", "")
        if not self._hosts.admits(host):
            return await send_error(scope, send, 403, "ForbiddenException", self._hosts.refusal(host))
        self._cors.prepare(scope)
        if self._cors.is_preflight(scope):
            return await self._cors.answer_preflight(scope, send)
        if self._cors.is_forgery(scope):
            message = "a page of another origin may only send JSON under its own content type (--allow-origin)"
            return await send_error(scope, send, 403, "ForbiddenException", message)
        admitted = self._lock.admits(scope)
        if scope["path"] == "/invocations" and (named := _ROUTE.search(headers.get(_ATTRIBUTES, ""))):
            path = named[1]
            if self._is_inference(scope, path):
                scope["path"] = path
            elif admitted:
                error = InvalidPayload(f"header {_ATTRIBUTES}: route={path[:64]} is no route for inference")
                return await send_answer(scope, send, self._service.refuse(error, scope["request_id"]))
        if admitted or not await self._lock.refuse(scope, send, self.routes):
            await self._router(scope, receive, send)

    def _is_inference(self, scope: Scope, path: str) -> bool:
        """Whether a dialect has its inference there: adapters are not for those who may only invoke."""
        return any(route.matches({**scope, "path": path})[0] is not Match.NONE for route in self._inference)

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
        service, config = self._service, self._service.config
        if scope["path_params"]["model"] != config.model_name:
            return await _model_not_found(scope, send)
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
        await send_answer(scope, send, HttpResponse(200, metrics.content_type, metrics.render()))


# -- requests ----------------------------------------------------------------------------------------------------


def _headers(scope: Scope) -> dict[str, str]:
    """The first of each name counts."""
    return {key.decode("latin-1"): value.decode("latin-1") for key, value in reversed(scope["headers"])}


# -- answers -----------------------------------------------------------------------------------------------------


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    message = "Requested resource is not found, please refer to API document."
    await send_error(scope, send, 404, "ResourceNotFoundException", message)


async def _model_not_found(scope: Scope, send: Send) -> None:
    await send_error(scope, send, 404, "ModelNotFoundException", f"Model not found: {scope['path_params']['model']}")
