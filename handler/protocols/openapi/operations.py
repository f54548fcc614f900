"""The server's own routes that are not for inference."""

from __future__ import annotations

from typing import Any

from handler.core.errors import AdapterFailed, BadRequest, Conflict, NoRoom, NotFound, Unavailable
from handler.protocols.kernel.json_schema import COUNT, FLAG, TEXT, Shape, listing, record
from handler.protocols.kernel.schema.description import Operation

_JSON, _TEXT, _HTML = "application/json", "text/plain", "text/html"
_ERROR = {"$ref": "#/components/schemas/FrontEndError"}
_NO_MODEL = (_JSON, _ERROR, {"code": 404, "type": "ModelNotFoundException", "message": "Model not found: other"})
_STATE = record({"status": TEXT, "state": TEXT}, {"reason": TEXT, "replicas": record({"ready": COUNT, "total": COUNT})})
_MODEL = record({"modelName": TEXT, "modelUrl": {"type": ["string", "null"]}, "status": TEXT})
_UNHEALTHY = record({"error": TEXT, "error_type": TEXT})

_ADAPTER = record({"name": TEXT, "id": COUNT, "src": TEXT, "preload": FLAG, "pin": FLAG})
_ADAPTER_EXAMPLE = {"name": "sql", "id": 1, "src": "adapters/sql", "preload": True, "pin": False}
_LIST = record({"adapters": listing(_ADAPTER)}, {"nextPageToken": TEXT})
_ADAPTER_CALL = {"name": TEXT, "src": TEXT, "preload": FLAG, "pin": FLAG}
_CHANGE = record({"status": TEXT}, {"id": COUNT})


_FAILURES: dict[int, tuple[str, Shape, Any]] = {
    error.status: (_JSON, _ERROR, {"code": error.status, "type": error.type, "message": error.message})
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


def _adapters(summary: str, shape: Shape, example: Any, *failures: int, **request: Any) -> Operation:
    answers = {200: (_JSON, shape, example)} | {status: _FAILURES[status] for status in failures}
    return Operation("Adapters", summary, answers, **request)


_ADAPTERS: dict[tuple[str, str], Operation] = {
    ("GET", "/adapters"): _adapters(
        "List the LoRA adapters", _LIST, {"adapters": [_ADAPTER_EXAMPLE]}, 400,
        query={"limit": COUNT, "next_page_token": TEXT},
    ),
    ("POST", "/adapters"): _adapters(
        "Register an adapter, by the query or by a body",
        _CHANGE, {"status": "Adapter sql registered", "id": 1}, 400, 409, 424, 503, 507,
        query=_ADAPTER_CALL, body=record({}, _ADAPTER_CALL, example={"name": "sql", "src": "adapters/sql"}),
    ),
    ("GET", "/adapters/{adapter}"): _adapters("Describe an adapter", _ADAPTER, _ADAPTER_EXAMPLE, 400, 404),
    ("DELETE", "/adapters/{adapter}"): _adapters(
        "Unregister an adapter", _CHANGE, {"status": "Adapter sql unregistered"}, 400, 404, 409
    ),
    ("POST", "/adapters/{adapter}/update"): _adapters(
        "Load an adapter again, from its place or from another",
        _CHANGE, {"status": "Adapter sql updated"}, 400, 404, 409, 424, 503,
        query=_ADAPTER_CALL, body=record({}, _ADAPTER_CALL, example={"src": "adapters/sql"}),
    ),
}  # fmt: skip

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/"): Operation(
        "Page", "The chat page for browsers (Accept: text/html); for others whether the model can serve, as in TGI",
        {200: (_HTML, TEXT, "<!doctype html>"),
         503: (_JSON, _UNHEALTHY, {"error": "unhealthy", "error_type": "healthcheck"})}, open=True,
    ),
    ("GET", "/docs"): Operation("Page", "The document as a page", {200: (_HTML, TEXT, "<!doctype html>")}, open=True),
    ("GET", "/api-doc/openapi.json"): Operation(
        "Page", "The API's document", {200: (_JSON, {"type": "object"}, {"openapi": "3.1.0"})}
    ),
    ("GET", "/ping"): Operation(
        "State", "Whether the model can serve",
        {200: (_JSON, _STATE, {"status": "Healthy", "state": "ready"}),
         503: (_JSON, _STATE, {"status": "Unhealthy", "state": "loading"})}, open=True,
    ),
    ("GET", "/models"): Operation(
        "State", "The model, as a list",
        {200: (_JSON, record({"models": listing(_MODEL)}),
               {"models": [{"modelName": "model", "modelUrl": None, "status": "READY"}]})},
    ),
    ("GET", "/models/{model}"): Operation(
        "State", "The model, its queue and its workers",
        {200: (_JSON, listing(record({"modelName": TEXT, "models": listing({"type": "object"})})),
               [{"modelName": "model", "models": [{"modelName": "model", "status": "READY", "requestInQueue": 0}]}]),
         404: _NO_MODEL},
    ),
    ("GET", "/metrics"): Operation(
        "State", "Metrics in Prometheus' text format",
        {200: (_TEXT, TEXT, "# TYPE lmi_active_sequences gauge\nlmi_active_sequences 0.0\n")},
    ),
    ("GET", "/execution-parameters"): Operation(
        "State", "How batch transform should call the server",
        {200: (_JSON, record({"MaxConcurrentTransforms": COUNT, "BatchStrategy": TEXT, "MaxPayloadInMB": COUNT}),
               {"MaxConcurrentTransforms": 32, "BatchStrategy": "SINGLE_RECORD", "MaxPayloadInMB": 3})},
    ),
    **_ADAPTERS,
    **{
        (method, "/models/{model}" + path): operation._replace(answers={404: _FAILURES[404], **operation.answers})
        for (method, path), operation in _ADAPTERS.items()
    },
}  # fmt: skip

PATH_PARAMETERS: dict[str, str] = {
    "model": "The model's name (option.model_name)",
    "version": "1, the only one",
    "adapter": "The adapter's name",
    "id": "The model's name or an adapter's",
}
