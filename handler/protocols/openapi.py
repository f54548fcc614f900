"""The API as an OpenAPI 3.1 document, built from the server's routes and the dialects' tables and types."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from handler import __version__
from handler.core.errors import AdapterFailed, BadRequest, Conflict, NoRoom, NotFound, Unavailable
from handler.protocols.anthropic.api import AnthropicError, AnthropicModel, AnthropicModels
from handler.protocols.api import (
    AdapterChange,
    Adapters,
    DescribedAdapter,
    DescribedModel,
    ExecutionParameters,
    Models,
    ModelState,
    ModelVersions,
    SessionAnswer,
    WorkerGroup,
)
from handler.protocols.kernel.dialect import Dialect, ServerContext
from handler.protocols.kernel.errors import FrontEndError
from handler.protocols.kernel.parameters import Answer, Description, Operation
from handler.protocols.kernel.schema import (
    COUNT,
    FLAG,
    TEXT,
    Shape,
    components_of,
    record,
    ref,
    schema_of_type,
)
from handler.protocols.openai.api import OpenAiError, OpenAiErrorFields, OpenAiModel, OpenAiModels
from handler.protocols.registry import dialects, dialects_of
from handler.protocols.tgi.api import UNHEALTHY, TgiError

# -- what the API's document says of each route ------------------------------------------------------------------------


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

SERVER_OPERATIONS: dict[tuple[str, str], Operation] = {
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


# -- calls about stateful sessions in the API's document (docs/sessions.md) --------------------------------------------


SESSION_COMPONENTS: Mapping[str, Shape] = {
    "SessionCall": record(
        {"requestType": {"enum": ["NEW_SESSION", "CLOSE"]}},
        description="Opens or closes a session; it has no other fields",
        additionalProperties=False,
    ),
    **components_of([SessionAnswer]),
}

SESSION_PARAMETER: Mapping[str, Any] = {
    "name": "X-Amzn-SageMaker-Session-Id",
    "in": "header",
    "schema": TEXT,
    "description": "The session of the request; NEW_SESSION beside the call that opens one",
}
"""The header that all requests for inference may have."""

_SESSION_ID = {
    "description": "The session that was opened, as `ID; Expires=2026-11-22T01:30:39Z` (UTC)",
    "schema": TEXT,
}

_SESSION_HEADERS: Mapping[str, Shape] = {
    "x-amzn-sagemaker-new-session-id": _SESSION_ID,
    "x-amzn-sagemaker-session-id": _SESSION_ID,
    "x-amzn-sagemaker-closed-session-id": {"description": "The session that was closed", "schema": TEXT},
}

_SESSION_EXAMPLE = {"result": "Session 6a1f4c2f-0d0c-4c7e-9d5a-3b1e2f4a5c6d created"}


def add_session_calls(operation: dict[str, Any]) -> None:
    """Add the calls about sessions, and their answers, to an operation for inference."""
    answer = operation["responses"]["200"]
    answer["headers"] = {**answer["headers"], **_SESSION_HEADERS}
    _add_body(operation["requestBody"]["content"], "SessionCall", {"requestType": "NEW_SESSION"})
    _add_body(answer["content"], "SessionAnswer", _SESSION_EXAMPLE)


def _add_body(content: dict[str, Any], name: str, example: Any) -> None:
    media = content.setdefault("application/json", {"schema": {"anyOf": []}, "examples": {}})
    shape = media["schema"]
    media["schema"] = {"anyOf": [*shape.get("anyOf", [shape]), ref(name)]}
    media["examples"]["Session"] = {"value": example}


_DESCRIPTION = (
    "Every route of this server. A refusal before the first token has its real status; what breaks later ends a "
    "stream with an error in it. Names that mean nothing are listed in the answer's header x-lmi-ignored-parameters."
)
_HEADERS: Shape = {
    "x-request-id": {"description": "The request's id, the client's own where it sent one", "schema": TEXT},
    "x-lmi-ignored-parameters": {"description": "Names in the body that meant nothing", "schema": TEXT},
}
_LOCKED = {"description": "No key, or a wrong one", "headers": {"www-authenticate": {"schema": TEXT}}}


_FOLDERS = dict.fromkeys(type(dialect).__module__.rpartition(".")[0] for dialect in dialects().values())
_DIALECTS: list[Any] = [importlib.import_module(f"{folder}.openapi") for folder in _FOLDERS]

DESCRIPTIONS: Mapping[str, Description] = {
    name: description for module in _DIALECTS for name, description in module.DESCRIPTIONS.items()
}
"""Dialect's name -> its bodies, out of `openapi.py` in the folder of each dialect in the registry."""

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    **SERVER_OPERATIONS,
    **{route: operation for module in _DIALECTS for route, operation in getattr(module, "OPERATIONS", {}).items()},
}
"""Method and path -> the operation, for routes that no description of a dialect covers."""


class DocumentedRoute(NamedTuple):
    """A route.

    Attributes:
        dialect: for inference, the dialect of its bodies.
        takes_calls: it takes calls about sessions.
    """

    path: str
    methods: Sequence[str]
    dialect: Dialect | None = None
    takes_calls: bool = False


def document(
    routes: Iterable[DocumentedRoute], context: ServerContext, *, locked: bool, has_sessions: bool = False
) -> dict[str, Any]:
    """Build the document.

    Args:
        context: names what the engine does not support.
        locked: the routes need a key, unless an operation is open.
        has_sessions: stateful sessions are on.
    """
    paths: dict[str, Any] = {}
    for route in routes:
        for method in route.methods:
            operation = _operation(route, method, locked)
            if has_sessions and route.dialect is not None and method == "POST":
                operation["parameters"] = [dict(SESSION_PARAMETER)]
                if route.takes_calls:
                    add_session_calls(operation)
            paths.setdefault(route.path, _path_item(route.path))[method.lower()] = operation
    used = {tag for item in paths.values() for name, one in item.items() if name != "parameters" for tag in one["tags"]}
    result: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "lmi-handler", "version": __version__, "description": _DESCRIPTION},
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": what} for name, what in GROUPS.items() if name in used],
        "paths": paths,
        "components": {"schemas": {**components(context), **(SESSION_COMPONENTS if has_sessions else {})}},
    }
    if locked:
        result["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        result["security"] = [{"key": []}, {"x-api-key": []}]
    return result


def components(context: ServerContext) -> dict[str, Shape]:
    """Return the schemas of all bodies, by name."""
    descriptions = DESCRIPTIONS.values()
    types = [
        *(kind for description in descriptions for kind in (description.answer, description.chunk, description.error)),
        *(kind for operation in OPERATIONS.values() for _, kind, _ in operation.answers.values()),
    ]
    return {description.request: description.request_shape(context) for description in descriptions} | components_of(
        [*types, FrontEndError]
    )


def _path_item(path: str) -> dict[str, Any]:
    names = re.findall(r"\{(\w+)\}", path)
    item: dict[str, Any] = {}
    if names:
        item["parameters"] = [
            {
                "name": name,
                "in": "path",
                "required": True,
                "schema": TEXT,
                "description": PATH_PARAMETERS.get(name, name),
            }
            for name in names
        ]
    return item


def _operation(route: DocumentedRoute, method: str, locked: bool) -> dict[str, Any]:
    name = re.sub(r"\W+", "_", route.path.strip("/")) or "root"
    shared: dict[str, Any] = {"operationId": f"{method.lower()}_{name.strip('_')}"}
    known = OPERATIONS.get((method, route.path))
    if known is not None:
        operation = _other(known)
    elif route.dialect is not None and method == "POST":
        operation = _inference(route.path, [DESCRIPTIONS[dialect.name] for dialect in dialects_of(route.dialect)])
    else:
        operation = {"summary": route.path, "tags": ["State"], "responses": {"200": {"description": "It succeeded"}}}
    if locked and known is not None and known.open:
        shared["security"] = []
    elif locked:
        operation["responses"]["401"] = _LOCKED
    return {**shared, **operation}


def _streams(dialects: Sequence[Description]) -> dict[str, Any]:
    """Map content types to the schema of each value of a stream."""
    kinds = dict.fromkeys(kind for dialect in dialects for kind in dialect.streams)
    return {
        kind: {"schema": _any_of(_shapes(dialect.chunk for dialect in dialects if kind in dialect.streams))}
        for kind in kinds
    }


def _inference(path: str, dialects: Sequence[Description]) -> dict[str, Any]:
    """Describe a route that takes any of these dialects."""
    content = _streams(dialects)
    if whole := [dialect for dialect in dialects if dialect.answer]:
        content["application/json"] = {
            "schema": _any_of(_shapes(dialect.answer for dialect in whole)),
            "examples": {dialect.title: {"value": dialect.answer_example} for dialect in whole},
        }
    if any(dialect.texts for dialect in dialects):
        content["text/plain"] = {"schema": {"type": "string"}}
    titles = ", ".join(dialect.title for dialect in dialects)
    group, summary = INFERENCE.get(path, (next(iter(GROUPS)), f"Generate by {titles}"))
    return {
        "tags": [group],
        "summary": summary,
        "description": f"Takes bodies of {titles}.",
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": _any_of([ref(dialect.request) for dialect in dialects]),
                    "examples": {dialect.title: {"value": dialect.example} for dialect in dialects},
                },
                **_forms(dialects),
            },
        },
        "responses": {
            "200": {
                "description": "The answer; of a stream, the schema is that of each value in it",
                "headers": _HEADERS,
                "content": content,
            },
            "default": {
                "description": "A refusal, or a failure before the first token",
                "content": {
                    "application/json": {"schema": _any_of(_shapes(dialect.error for dialect in dialects))},
                    **_streams([dialect for dialect in dialects if dialect.refuses_in_frame]),
                },
            },
        },
    }


def _forms(dialects: Sequence[Description]) -> dict[str, Any]:
    shapes = [ref(dialect.request) for dialect in dialects if dialect.forms]
    return {"multipart/form-data": {"schema": _any_of(shapes)}} if shapes else {}


def _shapes(kinds: Iterable[Any]) -> list[Shape]:
    """Return the schemas of the types, those of a union one by one."""
    shapes = [schema_of_type(kind) for kind in kinds]
    return [member for shape in shapes for member in shape.get("anyOf", [shape])]


def _any_of(shapes: Sequence[Shape]) -> Shape:
    distinct = [shape for index, shape in enumerate(shapes) if shape not in shapes[:index]]
    return distinct[0] if len(distinct) == 1 else {"anyOf": distinct} if distinct else {}


def _other(known: Operation) -> dict[str, Any]:
    operation: dict[str, Any] = {"tags": [known.tag], "summary": known.summary, "responses": {}}
    if known.query:
        operation["parameters"] = [
            {"name": name, "in": "query", "schema": shape} for name, shape in known.query.items()
        ]
    if known.body is not None:
        operation["requestBody"] = {"content": {"application/json": {"schema": known.body}}}
    for status, answer in known.answers.items():
        response: dict[str, Any] = {"description": "It succeeded" if status < 300 else "It did not"}
        content_type, kind, example = answer
        response["content"] = {content_type: {"schema": schema_of_type(kind), "example": example}}
        operation["responses"][str(status)] = response
    return operation
