"""Triton's bodies and other routes in the API's document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler import __version__
from handler.protocols.kernel.dialect import ServerContext
from handler.protocols.kernel.parameters import Description, Operation, parameters
from handler.protocols.kernel.schema import TEXT, Shape, listing, record
from handler.protocols.triton.api import (
    TritonConfig,
    TritonError,
    TritonMetadata,
    TritonResponse,
    TritonServer,
    TritonState,
    TritonTensor,
    TritonTensorConfig,
)
from handler.protocols.triton.request import INPUTS, TABLE, TEXTS


def _request(context: ServerContext) -> Shape:
    inputs = {
        name: {"anyOf": [shape, TEXT]} if INPUTS[name].datatype in TEXTS else shape
        for name, shape in parameters(TABLE.parameters, context).items()
    }
    text = {"text_input": {"anyOf": [TEXT, listing(TEXT, minItems=1, maxItems=1)]}}
    return record(
        {}, {**text, "id": TEXT, "parameters": {"type": "object", "properties": {**text, **inputs}}, **inputs}
    )


_EXAMPLE = {"text_input": "The capital of France is", "max_tokens": 8, "exclude_input_in_output": True}
_RESPONSE_EXAMPLE = {"model_name": "model", "model_version": "1", "text_output": " Paris."}
_EVENTS = "text/event-stream"


_RESPONSE = TritonResponse | TritonError
"""With status 200 Triton also reports that a model gives more responses than the route can."""


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

_UNKNOWN = (_JSON, TritonError, {"error": "Request for unknown model: 'other' is not found"})
_STATE = {200: (_TEXT, str, ""), 503: (_TEXT, str, "")}
_INPUT: TritonTensor = {"name": "text_input", "datatype": "BYTES", "shape": [-1]}
_INPUT_CONFIG: TritonTensorConfig = {"name": "text_input", "data_type": "TYPE_STRING", "dims": [-1], "optional": False}

_CONFIG: TritonConfig = {
    "name": "model",
    "platform": "openvino",
    "backend": "openvino",
    "max_batch_size": 0,
    "input": [_INPUT_CONFIG],
    "output": [],
    "model_transaction_policy": {"decoupled": True},
}

_OF_MODEL = {
    "": Operation(
        "Triton", "Describe the model, its inputs and outputs",
        {200: (_JSON, TritonMetadata, {"name": "model", "versions": ["1"], "platform": "openvino", "inputs": [_INPUT],
                                  "outputs": [{**_INPUT, "name": "text_output"}]}), 404: _UNKNOWN},
    ),
    "/ready": Operation("Triton", "Whether this model can serve, as Triton's clients ask", {**_STATE, 404: _UNKNOWN}),
    "/config": Operation(
        "Triton", "Show the model's configuration",
        {200: (_JSON, TritonConfig, _CONFIG), 404: _UNKNOWN},
    ),
}  # fmt: skip

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("GET", "/v2"): Operation(
        "Triton",
        "Describe the server, its version and extensions",
        {200: (_JSON, TritonServer, {"name": "lmi-handler", "version": __version__, "extensions": ["generate"]})},
    ),
    ("GET", "/v2/health/live"): Operation("Triton", "Whether the server runs, ready or not", {200: (_TEXT, str, "")}),
    ("GET", "/v2/health/ready"): Operation("Triton", "Whether the server is ready for requests", {**_STATE}),
    ("POST", "/v2/repository/index"): Operation(
        "Triton",
        "List the model and its state",
        {200: (_JSON, list[TritonState], [{"name": "model", "version": "1", "state": "READY"}])},
    ),
    **{
        ("GET", f"/v2/models/{{model}}{version}{end}"): operation._replace(summary=operation.summary + by)
        for version, by in (("", ""), ("/versions/{version}", ", by its version"))
        for end, operation in _OF_MODEL.items()
    },
}
