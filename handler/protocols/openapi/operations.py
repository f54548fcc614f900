"""What the API's document says of routes: a sentence and a group for those of inference, all of the server's others."""

from __future__ import annotations

from typing import Any

from handler.core.errors import AdapterFailed, BadRequest, Conflict, NoRoom, NotFound, Unavailable
from handler.protocols.anthropic.answers import AnthropicModel, AnthropicModels
from handler.protocols.anthropic.errors import AnthropicError
from handler.protocols.kernel.description import Answer, Operation
from handler.protocols.kernel.errors import FrontEndError
from handler.protocols.kernel.schema.shapes import COUNT, FLAG, TEXT, record
from handler.protocols.openai.answers import OpenAiModel, OpenAiModels
from handler.protocols.openai.errors import OpenAiError, OpenAiErrorFields
from handler.protocols.openapi.answers import (
    AdapterChange,
    Adapters,
    DescribedAdapter,
    DescribedModel,
    ExecutionParameters,
    Models,
    ModelState,
    ModelVersions,
    WorkerGroup,
)
from handler.protocols.tgi.errors import UNHEALTHY, TgiError

_JSON, _TEXT, _HTML = "application/json", "text/plain", "text/html"
_NO_MODEL = (_JSON, FrontEndError, {"code": 404, "type": "ModelNotFoundException", "message": "Model not found: other"})
_NO_OPENAI_MODEL: OpenAiErrorFields = {
    "message": "Model not found: other",
    "type": "invalid_request_error",
    "param": "model",
    "code": "model_not_found",
}
_MODEL_EXAMPLE: OpenAiModel = {
    "id": "model",
    "object": "model",
    "created": 1760000000,
    "owned_by": "lmi-handler",
    "root": "SmolLM2-135M-Instruct",
    "parent": None,
    "max_model_len": 8192,
    "input_modalities": ["text"],
}
_GROUP: WorkerGroup = {
    "device": {"deviceType": "cpu", "deviceId": -1},
    "minWorkers": 1,
    "maxWorkers": 1,
    "workers": [{"id": 1, "startTime": "2026-11-22T01:30:39Z", "status": "READY"}],
}
_DESCRIBED: DescribedModel = {
    "modelName": "model", "modelUrl": None, "engine": "openvino", "batchSize": 1, "maxBatchDelayMillis": 100,
    "queueSize": 1000, "requestInQueue": 0, "status": "READY", "loadedAtStartup": True, "workerGroups": [_GROUP],
}  # fmt: skip
_ADAPTER_EXAMPLE: DescribedAdapter = {"name": "sql", "id": 1, "src": "adapters/sql", "preload": True, "pin": False}
_ADAPTER_CALL = {"name": TEXT, "src": TEXT, "preload": FLAG, "pin": FLAG}

_FAILURES: dict[int, Answer] = {
    error.status: (_JSON, FrontEndError, {"code": error.status, "type": error.type, "message": error.message})
    for error in (
        BadRequest("LoRA is not enabled: echo: it was started without option.enable_lora=true"),
        NotFound("The adapter sql was not found"),
        Conflict("The adapter sql already exists"),
        AdapterFailed("src=adapters/sql: there is no such directory"),
        Unavailable("the engine is not ready: no adapter can be loaded"),
        NoRoom("there is room for 2 adapters (SAGEMAKER_MAX_NUMBER_OF_ADAPTERS_IN_MEMORY)"),
    )
}
"""Failures of calls about adapters, by status."""


def _adapters(summary: str, kind: Any, example: Any, *failures: int, **request: Any) -> Operation:
    answers = {200: (_JSON, kind, example)} | {status: _FAILURES[status] for status in failures}
    return Operation("Adapters", summary, answers, **request)


_ADAPTERS: dict[tuple[str, str], Operation] = {
    ("GET", "/adapters"): _adapters(
        "List the LoRA adapters", Adapters, {"adapters": [_ADAPTER_EXAMPLE]}, 400,
        query={"limit": COUNT, "next_page_token": TEXT},
    ),
    ("POST", "/adapters"): _adapters(
        "Register an adapter, by the query or by a body",
        AdapterChange, {"status": "Adapter sql registered", "id": 1}, 400, 409, 424, 503, 507,
        query=_ADAPTER_CALL, body=record({}, _ADAPTER_CALL, example={"name": "sql", "src": "adapters/sql"}),
    ),
    ("GET", "/adapters/{adapter}"): _adapters("Describe an adapter", DescribedAdapter, _ADAPTER_EXAMPLE, 400, 404),
    ("DELETE", "/adapters/{adapter}"): _adapters(
        "Unregister an adapter", AdapterChange, {"status": "Adapter sql unregistered"}, 400, 404, 409
    ),
    ("POST", "/adapters/{adapter}/update"): _adapters(
        "Load an adapter again, from its place or from another",
        AdapterChange, {"status": "Adapter sql updated"}, 400, 404, 409, 424, 503,
        query=_ADAPTER_CALL, body=record({}, _ADAPTER_CALL, example={"src": "adapters/sql"}),
    ),
}  # fmt: skip

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/"): Operation(
        "Page", "Show the chat page to browsers, and report to other clients whether the model can serve, as in TGI",
        {200: (_HTML, str, "<!doctype html>"),
         503: (_JSON, TgiError, UNHEALTHY)}, open=True,
    ),
    ("GET", "/docs"): Operation("Page", "Show all routes on a page", {200: (_HTML, str, "<!doctype html>")}, open=True),
    ("GET", "/api-doc/openapi.json"): Operation(
        "Page", "Describe all routes, as OpenAPI 3.1", {200: (_JSON, dict, {"openapi": "3.1.0"})}
    ),
    ("GET", "/ping"): Operation(
        "State", "Report whether the model can serve, as SageMaker and DJL Serving expect",
        {200: (_JSON, ModelState, {"status": "Healthy", "state": "ready"}),
         503: (_JSON, ModelState, {"status": "Unhealthy", "state": "loading"})}, open=True,
    ),
    ("GET", "/models"): Operation(
        "State", "List the model, as DJL Serving lists its models",
        {200: (_JSON, Models,
               {"models": [{"modelName": "model", "modelUrl": None, "status": "READY"}]})},
    ),
    ("GET", "/models/{model}"): Operation(
        "State", "Describe the model, its queue and its workers",
        {200: (_JSON, list[ModelVersions], [{"modelName": "model", "models": [_DESCRIBED]}]),
         404: _NO_MODEL},
    ),
    ("GET", "/metrics"): Operation(
        "State", "Export the metrics, in Prometheus' text format",
        {200: (_TEXT, str, "# TYPE lmi_active_sequences gauge\nlmi_active_sequences 0.0\n")},
    ),
    ("GET", "/execution-parameters"): Operation(
        "State", "Tell batch transform how to call the server",
        {200: (_JSON, ExecutionParameters,
               {"MaxConcurrentTransforms": 32, "BatchStrategy": "SINGLE_RECORD", "MaxPayloadInMB": 3})},
    ),
    ("GET", "/v1/models"): Operation(
        "OpenAI", "List the model and its adapters; in Anthropic's form for a request with anthropic-version",
        {200: (_JSON, OpenAiModels | AnthropicModels, {"object": "list", "data": [_MODEL_EXAMPLE]})},
        query={"limit": COUNT, "after_id": TEXT, "before_id": TEXT},
    ),
    ("GET", "/v1/models/{id}"): Operation(
        "OpenAI", "Describe the model or an adapter; in Anthropic's form for a request with anthropic-version",
        {200: (_JSON, OpenAiModel | AnthropicModel, _MODEL_EXAMPLE),
         404: (_JSON, OpenAiError | AnthropicError, {"error": _NO_OPENAI_MODEL})},
    ),
    **_ADAPTERS,
    **{
        (method, "/models/{model}" + path): operation._replace(
            summary=f"{operation.summary}; DJL Serving's path, with the model",
            answers={404: _FAILURES[404], **operation.answers},
        )
        for (method, path), operation in _ADAPTERS.items()
    },
}  # fmt: skip

_SHAPED = "Generate, whole or as a stream; the body's fields choose the API"
_TRITON_WHOLE, _TRITON_STREAM = (
    "Generate a whole answer, as Triton's generate extension",
    "Generate an answer as a stream of events, as Triton's extension",
)
_OF_VERSION = ", by the model's version"

INFERENCE: dict[str, tuple[str, str]] = {
    "/invocations": ("SageMaker and LMI", f"{_SHAPED}. SageMaker calls this route alone"),
    "/predictions/{model}": ("SageMaker and LMI", f"{_SHAPED}. DJL Serving's path"),
    "/predictions/{model}/{version}": ("SageMaker and LMI", f"{_SHAPED}. DJL Serving's path{_OF_VERSION}"),
    "/models/{model}/invoke": ("SageMaker and LMI", f"{_SHAPED}. The path of multi-model endpoints"),
    "/": ("TGI", "Answer at the root, as TGI, MindIE (option.root_schema) or text-embeddings-inference do"),
    "/generate": ("TGI", "Generate a whole answer to `inputs`"),
    "/generate_stream": ("TGI", "Generate an answer to `inputs` as a stream of events"),
    "/v1/chat/completions": ("OpenAI", "Answer a chat: tools, images, structured output, whole or as a stream"),
    "/v1/completions": ("OpenAI", "Continue a prompt, or several, or score them"),
    "/v1/responses": ("OpenAI", "Answer by the Responses API, which agents speak"),
    "/v1/responses/input_tokens": ("OpenAI", "Count the tokens of a request to /v1/responses without answering it"),
    "/v1/embeddings": ("OpenAI", "Compute a vector for each text"),
    "/v1/audio/transcriptions": ("OpenAI", "Write down what a clip says, in its language"),
    "/v1/audio/translations": ("OpenAI", "Write down in English what a clip says"),
    "/v1/messages": ("Anthropic", "Answer a conversation, as Anthropic's Messages API"),
    "/v1/messages/count_tokens": ("Anthropic", "Count the tokens of a request to /v1/messages without answering it"),
    "/v2/models/{model}/generate": ("Triton", _TRITON_WHOLE),
    "/v2/models/{model}/generate_stream": ("Triton", _TRITON_STREAM),
    "/v2/models/{model}/versions/{version}/generate": ("Triton", _TRITON_WHOLE + _OF_VERSION),
    "/v2/models/{model}/versions/{version}/generate_stream": ("Triton", _TRITON_STREAM + _OF_VERSION),
    "/embed": ("Text Embeddings Inference", "Compute a vector for each text, as a bare list"),
    "/similarity": ("Text Embeddings Inference", "Compare a sentence with others"),
    "/rerank": ("Text Embeddings Inference", "Order texts by how well they answer a query"),
    "/predict": ("Text Embeddings Inference", "Label texts, or pairs of texts"),
    "/v1/rerank": ("Cohere", "Order documents by how well they answer a query; the answer repeats them"),
    "/v2/rerank": ("Cohere", "Order documents by how well they answer a query; the answer has their places"),
    "/score": ("vLLM", "Score pairs of texts"),
    "/v1/score": ("vLLM", "Score pairs of texts; the path with the version"),
    "/pooling": ("vLLM", "Compute what the model's pooler returns"),
    "/classify": ("vLLM", "Label texts, with each label's probability"),
}
"""Path of a route for inference -> its group and its sentence."""

GROUPS: dict[str, str] = {
    "SageMaker and LMI": "LMI's requests; a body's fields may also choose OpenAI's, Anthropic's or Triton's form",
    "OpenAI": "The routes of OpenAI's SDKs, below /v1",
    "Anthropic": "The routes of Anthropic's SDKs, below /v1",
    "TGI": "The routes of Hugging Face's Text Generation Inference",
    "Text Embeddings Inference": "The routes of Hugging Face's server of that name",
    "Cohere": "The routes of Cohere's client",
    "Triton": "NVIDIA Triton's generate extension, and its routes about the model",
    "vLLM": "What vLLM's server has beside OpenAI's routes",
    "Adapters": "LoRA adapters: register, describe, remove",
    "State": "Health, the model, and metrics",
    "Page": "What a browser shows",
}
"""Groups of routes in their order, with what each is."""

PATH_PARAMETERS: dict[str, str] = {
    "model": "The model's name (option.model_name)",
    "version": "1, the only one",
    "adapter": "The adapter's name",
    "id": "The model's name or an adapter's",
    "response": "The id of a stored response",
}
