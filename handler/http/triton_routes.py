"""Triton's health, metadata, configuration and repository routes, which its clients call before they generate."""

from __future__ import annotations

from typing import Any

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from handler import __version__
from handler.core.errors import ModelNotFound
from handler.core.values import Task
from handler.http.inference import Endpoint, send_answer, send_json
from handler.protocols.kernel.errors import HttpResponse
from handler.protocols.registry import TRITON_MODEL
from handler.protocols.triton.api import (
    ERRORS,
    TritonConfig,
    TritonMetadata,
    TritonServer,
    TritonState,
    TritonTensor,
    TritonTensorConfig,
)
from handler.protocols.triton.request import VERSION, Datatypes, inputs, outputs
from handler.serving.model import ServedModel

_EXTENSIONS = ["model_repository"]


class TritonRoutes:
    """Those of the health, metadata, configuration and repository protocols that a server with one model can answer."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._generates = model.context.task is Task.GENERATION
        of_model = {"/ready": self._model_ready}
        if self._generates:  # else there are no tensors to describe
            of_model |= {"": self._metadata, "/config": self._config}
        self.routes = [
            _route("/v2", "GET", self._server),
            _route("/v2/health/live", "GET", self._live),
            _route("/v2/health/ready", "GET", self._ready),
            _route("/v2/repository/index", "POST", self._index),
            *[_route(path + end, "GET", handle) for path in TRITON_MODEL for end, handle in of_model.items()],
        ]

    # -- the server ----------------------------------------------------------------------------------------------

    async def _server(self, scope: Scope, receive: Receive, send: Send) -> None:
        extensions = ["generate", "model_configuration", *_EXTENSIONS] if self._generates else _EXTENSIONS
        value: TritonServer = {"name": "lmi-handler", "version": __version__, "extensions": extensions}
        await send_json(scope, send, 200, value)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _send_state(scope, send, fine=True)

    async def _ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _send_state(scope, send, fine=self._model.healthy)

    async def _index(self, scope: Scope, receive: Receive, send: Send) -> None:
        model = self._model
        state: TritonState = {"name": model.config.model_name, "version": VERSION, "state": "READY"}
        if not model.healthy:
            state["state"], state["reason"] = "UNAVAILABLE", model.reason or model.state
        await send_json(scope, send, 200, [state])

    # -- the model -----------------------------------------------------------------------------------------------

    async def _metadata(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await self._is_here(scope, send):
            value: TritonMetadata = {
                "name": self._model.config.model_name,
                "versions": [VERSION],
                "platform": self._platform,
                "inputs": _described(inputs()),
                "outputs": _described(outputs()),
            }
            await send_json(scope, send, 200, value)

    async def _model_ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await self._is_here(scope, send):
            await _send_state(scope, send, fine=self._model.healthy)

    async def _config(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await self._is_here(scope, send):
            required = next(iter(inputs()))
            value: TritonConfig = {
                "name": self._model.config.model_name,
                "platform": self._platform,
                "backend": self._platform,
                "max_batch_size": 0,
                "input": [{**one, "optional": one["name"] != required} for one in _configured(inputs())],
                "output": _configured(outputs()),
                "model_transaction_policy": {"decoupled": True},
            }
            await send_json(scope, send, 200, value)

    @property
    def _platform(self) -> str:
        model = self._model
        return model.info.name if model.info else str(model.config.llm_engine)

    async def _is_here(self, scope: Scope, send: Send) -> bool:
        """Return whether a path names the one model; if not, that is the answer."""
        name, version = scope["path_params"]["model"], scope["path_params"].get("version", VERSION)
        own = self._model.config.model_name
        if name == own and version == VERSION:
            return True
        await send_answer(scope, send, ERRORS.whole(ModelNotFound(name, version, served=[own])))
        return False


def _route(path: str, method: str, handle: Any) -> Route:
    return Route(path, Endpoint({method: handle}, errors=ERRORS))


async def _send_state(scope: Scope, send: Send, *, fine: bool) -> None:
    await send_answer(scope, send, HttpResponse(200 if fine else 503, "text/plain", b""))


def _described(datatypes: Datatypes) -> list[TritonTensor]:
    """As metadata has tensors; all are lists of any length, and a list of one may be sent as what it holds."""
    return [{"name": name, "datatype": datatype, "shape": [-1]} for name, datatype in datatypes.items()]


def _configured(datatypes: Datatypes) -> list[TritonTensorConfig]:
    """As a configuration has them."""
    types = {"BYTES": "STRING"}
    return [
        {"name": name, "data_type": f"TYPE_{types.get(datatype, datatype)}", "dims": [-1]}
        for name, datatype in datatypes.items()
    ]
