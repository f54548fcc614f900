"""The routes beside TGI's, OpenAI's and Triton's inference: what their clients ask of a server."""

from __future__ import annotations

from handler.protocols.openapi.operations import Operation
from handler.protocols.openapi.shapes import COUNT, FLAG, TEXT, Shape, listing, nullable, record, ref
from handler.protocols.tgi.errors import UNHEALTHY

_JSON, _TEXT = "application/json", "text/plain"

# -- TGI ---------------------------------------------------------------------------------------------------------

_UNHEALTHY = (_JSON, ref("TgiError"), UNHEALTHY)
_INFO: Shape = record(
    {
        "model_id": TEXT, "model_sha": nullable(TEXT), "model_pipeline_tag": TEXT, "max_concurrent_requests": COUNT,
        "max_best_of": COUNT, "max_stop_sequences": COUNT, "max_input_tokens": nullable(COUNT),
        "max_total_tokens": nullable(COUNT), "validation_workers": COUNT, "max_client_batch_size": COUNT,
        "router": TEXT, "version": TEXT,
    },
    {"sha": nullable(TEXT), "docker_label": nullable(TEXT)},
)  # fmt: skip
_INFO_EXAMPLE = {
    "model_id": "model", "model_sha": None, "model_pipeline_tag": "text-generation", "max_concurrent_requests": 1032,
    "max_best_of": 2, "max_stop_sequences": 4, "max_input_tokens": 8191, "max_total_tokens": 8192,
    "validation_workers": 2, "max_client_batch_size": 256, "router": "lmi-handler", "version": "0.1.0", "sha": None,
    "docker_label": None,
}  # fmt: skip
_PIECES = listing(record({"id": COUNT, "text": TEXT, "start": COUNT, "stop": COUNT}))
_PIECES_EXAMPLE = [{"id": 28120, "text": "Hello", "start": 0, "stop": 5}]

_TGI = {
    ("GET", "/info"): Operation("TGI", "What the server serves, and its limits", {200: (_JSON, _INFO, _INFO_EXAMPLE)}),
    ("GET", "/health"): Operation(
        "TGI", "Whether the model can serve", {200: (_TEXT, TEXT, ""), 503: _UNHEALTHY}, open=True
    ),
    ("POST", "/tokenize"): Operation(
        "TGI", "A prompt's tokens, with their places in its bytes", {200: (_JSON, _PIECES, _PIECES_EXAMPLE)},
        body={**ref("TgiGenerateRequest"), "example": {"inputs": "Hello"}},
    ),
    ("POST", "/chat_tokenize"): Operation(
        "TGI", "A chat's text as the model gets it, and its tokens",
        {200: (_JSON, record({"tokenize_response": _PIECES, "templated_text": TEXT}),
               {"tokenize_response": _PIECES_EXAMPLE, "templated_text": "Hello"})},
        body={**ref("OpenAiChatRequest"), "example": {"messages": [{"role": "user", "content": "Hello"}]}},
    ),
}  # fmt: skip

# -- OpenAI ------------------------------------------------------------------------------------------------------

_MODEL = record(
    {"id": TEXT, "object": {"const": "model"}, "created": COUNT, "owned_by": TEXT},
    {"root": TEXT, "parent": nullable(TEXT), "max_model_len": nullable(COUNT)},
)
_MODEL_EXAMPLE = {
    "id": "model", "object": "model", "created": 1760000000, "owned_by": "lmi-handler", "root": "model", "parent": None,
    "max_model_len": 8192,
}  # fmt: skip
_NO_MODEL = {
    "message": "Model not found: other",
    "type": "invalid_request_error",
    "param": "model",
    "code": "model_not_found",
}

_OPENAI = {
    ("GET", "/v1/models"): Operation(
        "OpenAI", "The model and its adapters",
        {200: (_JSON, record({"object": {"const": "list"}, "data": listing(_MODEL)}),
               {"object": "list", "data": [_MODEL_EXAMPLE]})},
    ),
    ("GET", "/v1/models/{id}"): Operation(
        "OpenAI", "One of them",
        {200: (_JSON, _MODEL, _MODEL_EXAMPLE), 404: (_JSON, ref("OpenAiError"), {"error": _NO_MODEL})},
    ),
}  # fmt: skip

# -- Triton ------------------------------------------------------------------------------------------------------

_TENSOR = record({"name": TEXT, "datatype": TEXT, "shape": listing({"type": "integer"})})
_CONFIGURED = record({"name": TEXT, "data_type": TEXT, "dims": listing({"type": "integer"})}, {"optional": FLAG})
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
        "input": listing(_CONFIGURED),
        "output": listing(_CONFIGURED),
    }
)
_INPUT = {"name": "text_input", "datatype": "BYTES", "shape": [-1]}
_INPUT_CONFIGURED = {"name": "text_input", "data_type": "TYPE_STRING", "dims": [-1], "optional": False}

_OF_MODEL = {
    "": Operation(
        "Triton", "The model, its inputs and outputs",
        {200: (_JSON, _METADATA, {"name": "model", "versions": ["1"], "platform": "openvino", "inputs": [_INPUT],
                                  "outputs": [{**_INPUT, "name": "text_output"}]}), 404: _UNKNOWN},
    ),
    "/ready": Operation("Triton", "Whether it can serve", {**_STATE, 404: _UNKNOWN}),
    "/config": Operation(
        "Triton", "Its configuration",
        {200: (_JSON, _CONFIG, {"name": "model", "platform": "openvino", "max_batch_size": 0,
                                "input": [_INPUT_CONFIGURED], "output": []}), 404: _UNKNOWN},
    ),
}  # fmt: skip

_TRITON = {
    ("GET", "/v2"): Operation(
        "Triton", "The server",
        {200: (_JSON, record({"name": TEXT, "version": TEXT, "extensions": listing(TEXT)}),
               {"name": "lmi-handler", "version": "0.1.0", "extensions": ["generate"]})},
    ),
    ("GET", "/v2/health/live"): Operation("Triton", "Whether the server runs", {200: (_TEXT, TEXT, "")}),
    ("GET", "/v2/health/ready"): Operation("Triton", "Whether the model can serve", {**_STATE}),
    ("POST", "/v2/repository/index"): Operation(
        "Triton", "The models that there are",
        {200: (_JSON, _INDEX, [{"name": "model", "version": "1", "state": "READY"}])},
    ),
    **{
        ("GET", f"/v2/models/{{model}}{version}{end}"): operation
        for version in ("", "/versions/{version}")
        for end, operation in _OF_MODEL.items()
    },
}  # fmt: skip

CLIENT_OPERATIONS = {**_TGI, **_OPENAI, **_TRITON}
