"""Routes of the vLLM, TGI, Triton and llama.cpp servers that are not for inference."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from handler import __commit__, __version__
from handler.config import environment
from handler.core.errors import BadRequest, InvalidPayload, ModelNotFound, NotFound, ServingError
from handler.core.values import Task
from handler.http.inference import (
    Endpoint,
    Handle,
    Inference,
    decode_short_body,
    read_short_body,
    send_answer,
    send_json,
    shows,
)
from handler.protocols.kernel.body import PYDANTIC
from handler.protocols.kernel.errors import HttpResponse
from handler.protocols.kernel.readers import show
from handler.protocols.kernel.texts import MAX_TEXTS, read_string
from handler.protocols.llamacpp.tokenize import APPLY_TEMPLATE
from handler.protocols.openai.completions import MAX_PROMPTS
from handler.protocols.registry import TOKENIZING, TRITON_MODEL
from handler.protocols.tgi.api import UNHEALTHY, TgiInfo
from handler.protocols.tgi.native import CHAT_TOKENIZE, MAX_BEST_OF, MAX_STOPS, TOKENIZE
from handler.protocols.triton.api import ERRORS as TRITON_ERRORS
from handler.protocols.triton.api import (
    VERSION,
    TritonConfig,
    TritonMetadata,
    TritonServer,
    TritonState,
    TritonStatistics,
    TritonTensor,
    TritonTensorConfig,
    statistics,
)
from handler.protocols.triton.models import TensorSpec, find_model
from handler.protocols.vllm.api import ERRORS, VllmLoad, VllmVersion
from handler.protocols.vllm.tokenize import DETOKENIZE
from handler.serving.admission import TOKENIZER_THREADS
from handler.serving.model import ServedModel
from handler.serving.request.task import ignored_header

_BODY = 1 << 20  # bytes
_TOKENIZER = "PreTrainedTokenizerFast"  # default of `tokenizer_class` in tokenizer_config.json


class VllmRoutes:
    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._may_update = environment.runtime_lora_updating()
        self.routes = [
            Route("/detokenize", Endpoint({"POST": Inference(self._model, DETOKENIZE)}, errors=ERRORS)),
            Route("/version", Endpoint({"GET": shows(self._version)}, errors=ERRORS)),
            Route("/tokenizer_info", Endpoint({"GET": self._tokenizer_info}, errors=ERRORS)),
            Route("/load", Endpoint({"GET": shows(self._load)}, errors=ERRORS)),
            Route("/v1/load_lora_adapter", Endpoint({"POST": self._handler(self._register)}, errors=ERRORS)),
            Route("/v1/unload_lora_adapter", Endpoint({"POST": self._handler(self._unregister)}, errors=ERRORS)),
        ]

    def _version(self, scope: Scope) -> VllmVersion:
        info = self._model.info
        own = info.version if info is not None and self._model.config.engine == "vllm" else __version__
        return {"version": own}

    async def _tokenizer_info(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = self._model.context
        if not context.config.enable_tokenizer_info_endpoint:
            why = "is available only with option.enable_tokenizer_info_endpoint=true"
            return await send_answer(scope, send, ERRORS.whole(NotFound(f"/tokenizer_info {why}")))
        if not context.tokenizer_config:
            why = "is not available: the model has no tokenizer_config.json"
            return await send_answer(scope, send, ERRORS.whole(NotFound(f"/tokenizer_info {why}")))
        template = {"chat_template": context.chat_template} if context.chat_template else {}
        value = {"tokenizer_class": _TOKENIZER, **context.tokenizer_config, **template}
        await send_json(scope, send, 200, value)

    def _load(self, scope: Scope) -> VllmLoad:
        return {"server_load": self._model.num_inferences}

    # -- LoRA adapters -------------------------------------------------------------------------------------------

    def _handler(self, change: Callable[[str, Mapping[str, Any]], Awaitable[str]]) -> Handle:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            with self._model.adapters.calls:
                try:
                    body = await self._read(scope, receive)
                    text = await change(read_string(body.get("lora_name"), "lora_name"), body)
                except ServingError as error:
                    return await send_answer(scope, send, ERRORS.whole(error))
                except ClientDisconnect:
                    return
                ignored = ignored_header([name for name in body if name not in _KNOWN])
                extra = [(name.encode(), value.encode()) for name, value in ignored.items()]
                await send_answer(scope, send, HttpResponse(200, "text/plain; charset=utf-8", text.encode()), extra)

        return handle

    async def _read(self, scope: Scope, receive: Receive) -> Mapping[str, Any]:
        """Return the parameters from the body."""
        if not self._may_update:
            raise NotFound(
                f"{scope['path']} is available only with VLLM_ALLOW_RUNTIME_LORA_UPDATING=true in the environment; "
                "/adapters works without this variable"
            )
        self._model.adapters.registry.check()
        body = await read_short_body(scope, receive, _BODY, self._model)
        value = await decode_short_body(scope, body, self._model)
        if not isinstance(value, dict):
            raise InvalidPayload("the body must be a JSON object with 'lora_name'")
        refuse = self._model.config.unknown_parameters == "refuse"
        if refuse and (unknown := next((name for name in value if name not in _KNOWN), None)):
            raise BadRequest(f"unknown parameter {unknown!r}; known: {', '.join(_KNOWN)}")
        return value

    async def _register(self, name: str, body: Mapping[str, Any]) -> str:
        adapters, src = self._model.adapters, read_string(body.get("lora_path"), "lora_path")
        if _flag(body, "is_3d_lora_weight"):
            raise BadRequest("is_3d_lora_weight=true is not supported: engines detect this from the adapter's files")
        if name in self._model.context.model_names:
            raise BadRequest(f"The lora adapter {name!r} conflicts with a served base model.")
        there = any(entry.adapter.name == name for entry in adapters.registry)
        change = adapters.update if _flag(body, "load_inplace") and there else adapters.register
        try:
            await change(name, src)
        except BadRequest as error:
            raise error.renamed(_NAMES) from None
        return f"Success: LoRA adapter '{name}' added successfully."

    async def _unregister(self, name: str, body: Mapping[str, Any]) -> str:
        self._model.adapters.unregister(name)
        return f"Success: LoRA adapter '{name}' removed successfully."


_NAMES = {"src": "lora_path", "name": "lora_name"}
"""Maps the fields in errors about adapters to vLLM's names for them."""

_KNOWN = ("lora_name", "lora_path", "load_inplace", "is_3d_lora_weight", "lora_int_id")


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = PYDANTIC.boolean(body.get(name))
    if value is None or isinstance(value, bool):
        return bool(value)
    raise InvalidPayload(f"'{name}' must be true or false, not {show(value)}")


# -- TGI's other routes, as in the router of text-generation-inference -------------------------------------------------


class TgiRoutes:
    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self.routes = [
            Route("/info", self._endpoint("GET", shows(self._info))),
            Route("/health", self._endpoint("GET", self._health)),
            Route("/tokenize", self._endpoint("POST", Inference(self._model, TOKENIZING))),
            Route("/chat_tokenize", self._endpoint("POST", Inference(self._model, CHAT_TOKENIZE))),
            Route(
                "/apply-template", Endpoint({"POST": Inference(model, APPLY_TEMPLATE)}, errors=APPLY_TEMPLATE.errors)
            ),
        ]

    def _endpoint(self, method: str, handle: Handle) -> Endpoint:
        return Endpoint({method: handle}, errors=TOKENIZE.errors)

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._model.availability.healthy:
            await send_answer(scope, send, HttpResponse(200, "text/plain; charset=utf-8", b""))
        else:
            await send_json(scope, send, 503, UNHEALTHY)

    def _info(self, scope: Scope) -> TgiInfo:
        config, total = self._model.config, self._model.context.most_tokens()
        generates = self._model.context.task is Task.GENERATION  # otherwise all tokens belong to the input
        tokens = None if total is None else min(total - generates, config.max_input_len or total)
        return {
            "model_id": config.model_id or config.name,
            "model_sha": config.engine_options.get("revision"),
            "model_pipeline_tag": self._model.context.task.value,
            "max_concurrent_requests": config.max_rolling_batch_size + config.job_queue_size,
            "max_best_of": MAX_BEST_OF,
            "max_stop_sequences": MAX_STOPS,
            "max_input_tokens": tokens,
            "max_total_tokens": total,
            "validation_workers": TOKENIZER_THREADS,
            "max_client_batch_size": MAX_PROMPTS if generates else MAX_TEXTS,  # TGI's own routes accept one prompt
            "router": "lmi-handler",
            "version": __version__,
            "sha": __commit__ or None,
            "docker_label": None,
            "default_sampling_params": self._model.context.generation.shown,
        }


# -- Triton's routes for health, metadata, configuration and repository, which its clients call before inference -------


_EXTENSIONS = ["model_repository", "statistics"]
_OF_GENERATION = ["generate", "model_configuration", "binary_tensor_data", "parameters"]
_SHARED_MEMORY = [f"/v2/{kind}sharedmemory" for kind in ("system", "cuda")]
_UNREGISTER = [f"{path}{region}/unregister" for path in _SHARED_MEMORY for region in ("", "/region/{region}")]


class TritonRoutes:
    """Triton's routes for health, metadata, configuration and repository, as they apply to a server with one model."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._generates = model.context.task is Task.GENERATION
        of_model = {"/ready": self._ready, "/stats": shows(self._statistics)}
        if self._generates:  # other tasks have no tensors to describe
            of_model |= {"": shows(self._metadata), "/config": shows(self._config)}
        self.routes = [
            _route("/v2", "GET", shows(self._server)),
            _route("/v2/health/live", "GET", self._live),
            _route("/v2/health/ready", "GET", self._ready),
            _route("/v2/repository/index", "POST", shows(self._index)),
            _route("/v2/models/stats", "GET", shows(self._statistics)),
            *[_route(f"{path}/status", "GET", shows(lambda scope: [])) for path in _SHARED_MEMORY],
            *[_route(f"{path}/region/{{region}}/register", "POST", self._register) for path in _SHARED_MEMORY],
            *[_route(path, "POST", self._live) for path in _UNREGISTER],  # nothing is registered: 200, as in Triton
            *[_route(p + end, "GET", self._of_model(do)) for p in TRITON_MODEL for end, do in of_model.items()],
        ]

    # -- the server ----------------------------------------------------------------------------------------------

    def _server(self, scope: Scope) -> TritonServer:
        extensions = [*_OF_GENERATION, *_EXTENSIONS] if self._generates else _EXTENSIONS
        return {"name": "lmi-handler", "version": __version__, "extensions": extensions}

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _send_state(scope, send, fine=True)

    async def _ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _send_state(scope, send, fine=self._model.availability.healthy)

    def _index(self, scope: Scope) -> list[TritonState]:
        model = self._model
        state: TritonState = {"name": "", "version": VERSION, "state": "READY"}
        if not model.availability.healthy:
            state["state"], state["reason"] = "UNAVAILABLE", model.availability.reason or model.availability.state
        return [{**state, "name": name} for name in model.config.model_name]

    def _statistics(self, scope: Scope) -> TritonStatistics:
        name, ended = scope["path_params"].get("model", self._model.config.name), self._model.metrics.ended
        return statistics(name, ended.durations, ended.last)

    async def _register(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = InvalidPayload("shared memory is not supported: send tensors as JSON or as binary data")
        await send_answer(scope, send, TRITON_ERRORS.whole(error))

    # -- the model -----------------------------------------------------------------------------------------------

    def _metadata(self, scope: Scope) -> TritonMetadata:
        name: str = scope["path_params"]["model"]
        model = find_model(name)
        return {
            "name": name,
            "versions": [VERSION],
            "platform": self._model.engine_name,
            "inputs": _described(model.inputs),
            "outputs": _described(model.outputs),
        }

    def _config(self, scope: Scope) -> TritonConfig:
        name: str = scope["path_params"]["model"]
        model = find_model(name)
        inputs = _configured(model.inputs)
        return {
            "name": name,
            "platform": self._model.engine_name,
            "backend": self._model.engine_name,
            "max_batch_size": 1,
            "input": [{**tensor, "optional": tensor["name"] != model.prompt} for tensor in inputs],
            "output": _configured(model.outputs),
            "model_transaction_policy": {"decoupled": True},
        }

    def _of_model(self, handle: Handle) -> Handle:
        """Wrap a handler so that it refuses paths with another model name or version."""

        async def checked(scope: Scope, receive: Receive, send: Send) -> None:
            name, version = scope["path_params"]["model"], scope["path_params"].get("version", VERSION)
            own = self._model.config.model_name
            if name in own and version == VERSION:
                await handle(scope, receive, send)
            else:
                await send_answer(scope, send, TRITON_ERRORS.whole(ModelNotFound(name, version, served=own)))

        return checked


def _route(path: str, method: str, handle: Any) -> Route:
    return Route(path, Endpoint({method: handle}, errors=TRITON_ERRORS))


async def _send_state(scope: Scope, send: Send, *, fine: bool) -> None:
    await send_answer(scope, send, HttpResponse(200 if fine else 503, "text/plain", b""))


def _described(tensors: Mapping[str, TensorSpec]) -> list[TritonTensor]:
    """Describe tensors as in Triton's metadata, where shapes begin with the batch dimension."""
    return [{"name": name, "datatype": datatype, "shape": [-1, *dims]} for name, (datatype, dims) in tensors.items()]


def _configured(tensors: Mapping[str, TensorSpec]) -> list[TritonTensorConfig]:
    """Describe tensors as in Triton's model configuration."""
    types = {"BYTES": "STRING"}
    return [
        {"name": name, "data_type": f"TYPE_{types.get(datatype, datatype)}", "dims": [*dims]}
        for name, (datatype, dims) in tensors.items()
    ]
