"""The ASGI application of the embedded server, with the routes of DJL Serving and of the other dialects.

It uses Starlette for routing only. Starlette's middleware would wrap `send`, which costs more per streamed chunk than
everything else here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
import traceback
from collections.abc import Awaitable, Callable

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from handler.config.config import Config
from handler.core.errors import ConfigError, InvalidPayload, ModelNotFound, RouteNotFound
from handler.http import background_responses
from handler.http.batch_routes import BatchRoutes
from handler.http.conversation_routes import ConversationRoutes
from handler.http.custom import FASTAPI, CustomCode, missing_of
from handler.http.exchange import EXCHANGE, AsgiExchange
from handler.http.foreign_routes import TgiRoutes, TritonRoutes, VllmRoutes
from handler.http.inference import (
    Endpoint,
    Inference,
    send_answer,
    send_error,
    send_json,
    send_refusal,
    shows,
)
from handler.http.message_batch_routes import MessageBatchRoutes
from handler.http.response_routes import ResponseRoutes
from handler.http.routes import OPEN_PATHS, AdapterRoutes, ModelRoutes, PageRoutes, Records
from handler.http.security import OPEN, Access, AdmittedHead, AllowedHosts, Checks, read_access
from handler.http.sockets.asgi import AsgiHandshake, http_scope
from handler.http.sockets.readers import INVOKE_SOCKET, REALTIME
from handler.http.sockets.routes import Sockets
from handler.plugins.aws import Handlers
from handler.plugins.functions import Formatters
from handler.protocols import registry
from handler.protocols.api import (
    DescribedModel,
    ExecutionParameters,
    ListedModel,
    ModelState,
    ModelVersions,
    Worker,
)
from handler.protocols.kernel.errors import HttpResponse
from handler.protocols.openai.api import ServedModels
from handler.serving.admission import INVOKE, canonical_path
from handler.serving.check import check
from handler.serving.engine import read_sources
from handler.serving.head import ATTRIBUTES, in_attributes
from handler.serving.model import ServedModel
from handler.serving.start import running
from handler.serving.user_code import model_formatters

log = logging.getLogger("handler.server")

_SHARE = 0.05  # share of the event loop's time for /metrics, of which a rendering takes milliseconds
_MAX_CREDIT = 0.25  # seconds of CPU time that /metrics may save up

_SERVER = "*"  # the target of a request about the whole server, with which a proxy checks it (RFC 9110, section 9.3.7)

_TRANSFORM = 100
"""Maximum total size of the payloads that SageMaker batch transform sends concurrently, in megabytes."""


class App:
    """The ASGI application of a served model. It requires the ASGI extension that `http/exchange.py` defines.

    Args:
        access: the API keys and origins that are allowed to use the application.
        hosts: allowed values of the Host header. By default, all values are allowed.
        handlers: the user's handlers and middleware, which replace routes and run around them.
        sockets: opens WebSockets, and may have opened some while the model was loaded.
    """

    def __init__(
        self,
        model: ServedModel,
        access: Access = OPEN,
        hosts: AllowedHosts | None = None,
        handlers: Handlers | None = None,
        sockets: Sockets | None = None,
    ) -> None:
        self._model = model
        self._rendered = Budgeted(model.metrics.render)
        records = Records(model) if model.config.batch_transform else Inference(model)
        invoke = Endpoint({"POST": records})
        sockets = sockets or Sockets(model.config)
        page = PageRoutes(model, lambda: self.routes, locked=bool(access.keys))
        detach = {} if model.background is None else {"/v1/responses": background_responses.create}
        own = [
            Route(
                path,
                Endpoint(
                    {"POST": Inference(model, dialect, detach.get(path)), **page.beside(path)},
                    errors=dialect.errors,
                    socket=sockets.at(path),
                ),
            )
            for path, dialect in model.admission.routes.dialects.items()
        ]
        self._names = ModelRoutes(model)
        self.routes = [
            *[Route(path, invoke) for path in INVOKE],
            *[Route(path, Endpoint({}, socket=sockets.at(path))) for path in (INVOKE_SOCKET, REALTIME)],
            *own,
            *(grpc_routes(model) if model.config.grpc_port else ()),
            *page.routes,
            Route("/ping", Endpoint({"GET": self._ping})),
            Route("/models", Endpoint({"GET": shows(self._models)})),
            Route("/models/{model}", Endpoint({"GET": self._describe_model})),
            Route("/metrics", Endpoint({"GET": self._metrics})),
            Route("/execution-parameters", Endpoint({"GET": shows(self._execution_parameters)})),
            *AdapterRoutes(model).routes,
            *BatchRoutes(model).routes,
            *MessageBatchRoutes(model).routes,
            *TgiRoutes(model).routes,
            *self._names.routes,
            *ResponseRoutes(model).routes,
            *ConversationRoutes(model).routes,
            *TritonRoutes(model).routes,
            *VllmRoutes(model).routes,
        ]
        self._router = Router(self.routes, default=self._not_found, redirect_slashes=False)
        self._exact: dict[str, ASGIApp] = {
            **dict.fromkeys(registry.PATHS, self._not_found),
            **{route.path: route.app for route in reversed(self.routes) if "{" not in route.path},
            _SERVER: Endpoint({"OPTIONS": shows(lambda scope: {})}),
        }
        open_paths = {("GET", "/ping"), ("GET", "/health"), ("OPTIONS", _SERVER), *OPEN_PATHS}
        self._checks = Checks(access, hosts, open_paths, model.config.owner_header)
        is_custom = handlers is not None or model.handle is not None
        self._inner: ASGIApp = CustomCode(handlers, model, self._route) if is_custom else self._route
        sockets.serve(model, self._inner)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "only HTTP requests are supported"
        memo = scope["extensions"][EXCHANGE].memo
        if memo is not None and self in memo:
            memo[self].apply_to(scope)
        elif not await self._admits(scope, send):
            return
        elif memo is not None:  # for this application only, because another one may admit other clients
            memo[self] = AdmittedHead(scope, has_keys=self._checks.keys.are_checked)
        await self._inner(scope, receive, send)

    async def _admits(self, scope: Scope, send: Send) -> bool:
        """Return whether a request may reach the routes. If not, send the response."""
        error = self._checks.refusal(scope)
        if error is not None:
            await send_error(scope, send, error)
            return False
        if self._checks.cors.is_preflight(scope):
            await self._checks.cors.answer_preflight(scope, send)
            return False
        headers = scope["headers_by_name"]
        has_key = self._checks.keys.admits(scope)
        if scope["path"] == "/invocations" and (path := in_attributes(headers, "route")) is not None:
            # A client that may only invoke must not reach routes like /adapters.
            if self._model.admission.routes.has(path):
                scope["path"] = canonical_path(path)
            elif has_key:
                invalid = InvalidPayload(f"header {ATTRIBUTES}: {self._model.admission.routes.refusal(path)}")
                with self._model.refused(invalid, id=scope["request_id"]) as task:
                    await send_answer(scope, send, task.take_whole())
                return False
        return has_key or not await self._checks.keys.refuse(scope, send, self.routes)

    def _route(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Call the application for the path. Fixed paths are looked up, because the router tries its routes in turn."""
        app = self._exact.get(scope["path"])
        if app is None:
            return self._router(scope, receive, send)
        scope["path_params"] = {}
        return app(scope, receive, send)

    # -- state ---------------------------------------------------------------------------------------------------

    async def _ping(self, scope: Scope, receive: Receive, send: Send) -> None:
        model = self._model
        healthy, reason = model.availability.healthy, model.availability.reason
        value: ModelState = {"status": "Healthy" if healthy else "Unhealthy", "state": model.availability.state}
        if reason:
            value["reason"] = reason
        if replicas := model.replicas:
            value["replicas"] = {"ready": sum(replica.ready for replica in replicas), "total": len(replicas)}
        await send_json(scope, send, 200 if healthy else 503, value)

    def _models(self, scope: Scope) -> ServedModels:
        config = self._model.config
        listed: ListedModel = {
            "modelName": config.name,
            "modelUrl": config.model_id,
            "status": self._status(),
        }
        return {"models": [listed], "object": "list", "data": self._names.described()}

    async def _describe_model(self, scope: Scope, receive: Receive, send: Send) -> None:
        model, config = self._model, self._model.config
        if (name := scope["path_params"]["model"]) not in config.model_name:
            return await send_error(scope, send, ModelNotFound(name, served=config.model_name))
        workers = self._workers()
        description: DescribedModel = {
            "modelName": config.name,
            "modelUrl": config.model_id,
            "engine": model.engine_name,
            "batchSize": config.batch_size,
            "maxBatchDelayMillis": config.max_batch_delay,
            "queueSize": config.job_queue_size,
            "requestInQueue": model.num_queued,
            "status": self._status(),
            "loadedAtStartup": True,
            "workerGroups": [
                {
                    "device": {"deviceType": "cpu", "deviceId": -1},
                    "minWorkers": len(workers),
                    "maxWorkers": len(workers),
                    "workers": workers,
                }
            ],
        }
        versions: list[ModelVersions] = [{"modelName": config.name, "models": [description]}]
        return await send_json(scope, send, 200, versions)

    def _workers(self) -> list[Worker]:
        """Return a worker for each replica, as DJL Serving describes its workers."""
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._model.availability.started_at))
        states = ["READY" if replica.ready else "PENDING" for replica in self._model.replicas] or [self._status()]
        return [{"id": id, "startTime": started, "status": status} for id, status in enumerate(states, 1)]

    def _execution_parameters(self, scope: Scope) -> ExecutionParameters:
        """Return the settings with which batch transform sends the records of a job. Each record is a separate request,
        and the number of concurrent requests is the number of sequences that the engine runs, up to `_TRANSFORM`.
        """
        concurrent = min(self._model.max_sequences, _TRANSFORM)
        return {
            "MaxConcurrentTransforms": concurrent,
            "BatchStrategy": "SINGLE_RECORD",
            "MaxPayloadInMB": min(6, _TRANSFORM // concurrent),  # 6 is SageMaker's default
        }

    def _status(self) -> str:
        return {"ready": "READY", "loading": "PENDING", "restarting": "PENDING"}.get(
            self._model.availability.state, "UNLOADED"
        )

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        text = await self._rendered.get()
        await send_answer(scope, send, HttpResponse(200, self._model.metrics.content_type, text))

    async def _not_found(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (refused := registry.refuse_path(scope["path"], self._model.context.task)) is not None:
            return await send_refusal(scope, send, refused)
        message = "Requested resource is not found, please refer to API document."
        await send_error(scope, send, RouteNotFound(message))


class Budgeted:
    """Makes a costly call on the event loop within a budget of CPU time. Callers that wait share the next result, which
    is never older than their own call.

    Args:
        call: the call, which returns bytes.
        now: function that returns the time, in seconds.
        cpu: function that returns the CPU time of the thread, in seconds.
    """

    def __init__(
        self,
        call: Callable[[], bytes],
        now: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._call = call
        self._now = now
        self._cpu = cpu
        self._turn = asyncio.Lock()  # one caller continues per iteration of the event loop
        self._credit = _MAX_CREDIT  # seconds
        self._counted_at = now()
        self._result = b""
        self._result_at = -math.inf

    async def get(self) -> bytes:
        """Return the result of a call that began after this one."""
        called_at = self._now()
        async with self._turn:
            if self._result_at < called_at:
                credit = self._count()
                if credit < 0:
                    await asyncio.sleep(-credit / _SHARE)
                before = self._cpu()
                self._result_at = self._now()
                self._result = self._call()
                self._credit -= self._cpu() - before
            return self._result

    def _count(self) -> float:
        """Return the CPU time that may be spent now, in seconds. It is negative after an expensive call."""
        now = self._now()
        self._credit = min(_MAX_CREDIT, self._credit + _SHARE * (now - self._counted_at))
        self._counted_at = now
        return self._credit


def grpc_routes(model: ServedModel) -> list[Route]:
    """Return the routes for Triton's gRPC inference calls."""
    from handler.http.grpc import INFER, STREAM  # imports grpcio
    from handler.protocols.triton.grpc import InferMessages

    dialects = {INFER: InferMessages(may_stream=False), STREAM: InferMessages(may_stream=True)}
    return [
        Route(path + model_path, Endpoint({"POST": Inference(model, dialect)}, errors=dialect.errors))
        for path, dialect in dialects.items()
        for model_path in ("/{model}", "/{model}/versions/{version}")
    ]


# -- other ASGI servers ------------------------------------------------------------------------------------------------


def create_app(
    *options: str, model: str | None = None, origins: tuple[str, ...] = (), hosts: tuple[str, ...] = ()
) -> MountedApp:
    """Create an application that any ASGI server can run, as in `hypercorn 'handler.http.app:create_app()'`.

    Like `lmi serve`, this function also reads options from the environment (`OPTION_*`), and API keys from LMI_API_KEY.

    Args:
        options: options in the form `option.NAME=VALUE`, as for `lmi serve -o`.
        model: the model, as for `lmi serve`.
        origins: allowed origins, as for `--allow-origin`.
        hosts: allowed hosts, as for `--allow-host`.

    Raises:
        ConfigError: the configuration is invalid. The error lists all problems that can be detected before the model is
            loaded.
    """
    reading = read_sources(model, overrides=options)
    problems, access = check(reading, handlers=True), OPEN
    with problems:
        access = read_access(origins=origins, hosts=hosts, environ=os.environ)
    problems.check()
    return MountedApp(reading.config, access)


def users_functions(config: Config) -> Formatters:
    """Import and thus run the user code, and return its formatters and handlers.

    Raises:
        ConfigError: the user code cannot be used.
    """
    FASTAPI.install()
    titles = model_formatters(config, handlers=True)  # this also installs requirements.txt
    for message in missing_of(config):
        log.warning("%s", message)
    return titles


class MountedApp:
    """An application that any ASGI server can run. It loads the model at the startup event of the lifespan protocol,
    and closes it at the shutdown event.
    """

    def __init__(self, config: Config, access: Access) -> None:
        self._config = config
        self._access = access
        self._model: ServedModel | None = None
        self._handlers: Handlers | None = None
        self._sockets = Sockets(config)
        self._apps: dict[str, App] = {}  # by the server's address, which determines the allowed hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._live(receive, send)
        if self._model is None:
            raise RuntimeError("the model is not loaded: the ASGI server must run the lifespan protocol")
        address = str((scope.get("server") or ("",))[0])
        if address not in self._apps:
            hosts = AllowedHosts.of(self._access, address, address)
            self._apps[address] = App(self._model, self._access, hosts, self._handlers, self._sockets)
        root, path = scope.get("root_path", "").rstrip("/"), scope["path"]
        inner = {**scope, "path": path.removeprefix(root) if path.startswith(f"{root}/") else path, "root_path": ""}
        if scope["type"] == "websocket":
            return await self._open_socket(self._apps[address], inner, receive, send)
        exchange = AsgiExchange(receive, send, scope["http_version"])
        inner["extensions"] = {**(scope.get("extensions") or {}), EXCHANGE: exchange}
        try:
            await self._apps[address](inner, receive, exchange.send)
        finally:
            exchange.close()

    async def _open_socket(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        handshake = AsgiHandshake(scope, receive, send)
        try:
            await app({**http_scope(scope), "extensions": {EXCHANGE: handshake}}, receive, handshake.send)
        finally:
            await handshake.finish()

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()  # lifespan.startup
        async with contextlib.AsyncExitStack() as at_end:
            try:
                functions = users_functions(self._config)
                self._handlers = functions.handlers
                self._model = await at_end.enter_async_context(running(self._config, functions))
            except Exception as error:  # if it were raised, servers would assume no lifespan support, and continue
                message = str(error) if isinstance(error, ConfigError) else traceback.format_exc()
                return await send({"type": "lifespan.startup.failed", "message": message})
            await send({"type": "lifespan.startup.complete"})
            await receive()  # lifespan.shutdown
        await send({"type": "lifespan.shutdown.complete"})
