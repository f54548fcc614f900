"""Triton's bodies and other routes in the API's document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.protocols.kernel.base import ServerContext
from handler.protocols.kernel.json_schema import COUNT, FLAG, TEXT, Shape, listing, record, ref
from handler.protocols.kernel.schema.description import Description, Operation, parameters
from handler.protocols.triton.answers import TritonError, TritonResponse
from handler.protocols.triton.inputs import TABLE


def _request(context: ServerContext) -> Shape:
    inputs = parameters(TABLE.parameters, context)
    text = {"text_input": {"anyOf": [TEXT, listing(TEXT, minItems=1, maxItems=1)]}}
    return record(
        {}, {**text, "id": TEXT, "parameters": {"type": "object", "properties": {**text, **inputs}}, **inputs}
    )


_EXAMPLE = {"text_input": "The capital of France is", "max_tokens": 8, "exclude_input_in_output": True}
_RESPONSE_EXAMPLE = {"model_name": "model", "model_version": "1", "text_output": " Paris."}
_EVENTS = "text/event-stream"


_RESPONSE = TritonResponse | TritonError
"""Triton reports under 200, too, that a model gives more responses than the route can."""


def _triton(answer: Any, *streams: str) -> Description:
    return Description(
        "Triton",
        "TritonRequest",
        _request,
        TritonError,
        _EXAMPLE,
        answer,
        _RESPONSE_EXAMPLE if answer else None,
        _RESPONSE if streams else None,
        streams,
    )


DESCRIPTIONS: Mapping[str, Description] = {
    "triton_generate": _triton(_RESPONSE),
    "triton_generate_stream": _triton(None, _EVENTS),
    "triton_shape": _triton(_RESPONSE, _EVENTS),
}
"""By the dialect's name."""

# -- other routes ------------------------------------------------------------------------------------------------

_JSON, _TEXT = "application/json", "text/plain"

_TENSOR = record({"name": TEXT, "datatype": TEXT, "shape": listing({"type": "integer"})})
_TENSOR_CONFIG = record({"name": TEXT, "data_type": TEXT, "dims": listing({"type": "integer"})}, {"optional": FLAG})
_UNKNOWN = (_JSON, ref("TritonError"), {"error": "Request for unknown model: 'other' is not found"})
_STATE = {200: (_TEXT, TEXT, ""), 503: (_TEXT, TEXT, "")}
_INDEX = listing(record({"name": TEXT, "version": TEXT, "state": TEXT}, {"reason": TEXT}))
_METADATA = record(
    {"name": TEXT, "versions": listing(TEXT), "platform": TEXT, "inputs": listing(_TENSOR), "outputs": listing(_TENSOR)}
)
_CONFIG = record(
    {
        "name": TEXT,
        "platform": TEXT,
        "max_batch_size": COUNT,
        "input": listing(_TENSOR_CONFIG),
        "output": listing(_TENSOR_CONFIG),
    }
)
_INPUT = {"name": "text_input", "datatype": "BYTES", "shape": [-1]}
_INPUT_CONFIG = {"name": "text_input", "data_type": "TYPE_STRING", "dims": [-1], "optional": False}

_OF_MODEL = {
    "": Operation(
        "Triton", "The model, its inputs and outputs",
        {200: (_JSON, _METADATA, {"name": "model", "versions": ["1"], "platform": "openvino", "inputs": [_INPUT],
                                  "outputs": [{**_INPUT, "name": "text_output"}]}), 404: _UNKNOWN},
    ),
    "/ready": Operation("Triton", "Whether the model can serve", {**_STATE, 404: _UNKNOWN}),
    "/config": Operation(
        "Triton", "The model's configuration",
        {200: (_JSON, _CONFIG, {"name": "model", "platform": "openvino", "max_batch_size": 0,
                                "input": [_INPUT_CONFIG], "output": []}), 404: _UNKNOWN},
    ),
}  # fmt: skip

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("GET", "/v2"): Operation(
        "Triton", "The server, its version and extensions",
        {200: (_JSON, record({"name": TEXT, "version": TEXT, "extensions": listing(TEXT)}),
               {"name": "lmi-handler", "version": "0.1.0", "extensions": ["generate"]})},
    ),
    ("GET", "/v2/health/live"): Operation("Triton", "Whether the server runs", {200: (_TEXT, TEXT, "")}),
    ("GET", "/v2/health/ready"): Operation("Triton", "Whether the model can serve", {**_STATE}),
    ("POST", "/v2/repository/index"): Operation(
        "Triton", "The model and its state, as a list",
        {200: (_JSON, _INDEX, [{"name": "model", "version": "1", "state": "READY"}])},
    ),
    **{
        ("GET", f"/v2/models/{{model}}{version}{end}"): operation
        for version in ("", "/versions/{version}")
        for end, operation in _OF_MODEL.items()
    },
}  # fmt: skip
