"""vLLM's bodies and other routes in the API's document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.protocols.kernel.messages import MESSAGES
from handler.protocols.kernel.parameters import Description, Operation, request_shape
from handler.protocols.kernel.schema import COUNT, FLAG, TEXT, listing, nullable, record
from handler.protocols.kernel.texts import NON_EMPTY
from handler.protocols.vllm import pooling
from handler.protocols.vllm.api import VllmError, VllmLabels, VllmLoad, VllmPooled, VllmScores, VllmText, VllmVersion
from handler.protocols.vllm.score import FIELDS, TABLE

_HEAD = {"object": "list", "created": 1760000000, "model": "model"}
_USAGE = {"prompt_tokens": 9, "total_tokens": 9, "completion_tokens": 0, "prompt_tokens_details": None}

DESCRIPTIONS: Mapping[str, Description] = {
    "vllm_score": Description(
        "vLLM's score",
        "VllmScoreRequest",
        request_shape(FIELDS, TABLE),
        VllmError,
        {"model": "", "text_1": "What is deep learning?", "text_2": ["A cheese", "A kind of machine learning"]},
        VllmScores,
        {
            **_HEAD,
            "id": "score-0",
            "data": [{"index": 0, "object": "score", "score": 0.1}],
            "usage": _USAGE,
        },
    ),
    "vllm_classify": Description(
        "vLLM's classification",
        "VllmClassifyRequest",
        request_shape(pooling.FIELDS, pooling.CLASSIFY),
        VllmError,
        {"model": "", "input": "I like you."},
        VllmLabels,
        {
            **_HEAD,
            "id": "classify-0",
            "data": [{"index": 0, "label": "POSITIVE", "probs": [0.1, 0.9], "num_classes": 2}],
            "usage": _USAGE,
        },
    ),
    "vllm_pooling": Description(
        "vLLM's pooling",
        "VllmPoolingRequest",
        request_shape(pooling.FIELDS, pooling.POOLING),
        VllmError,
        {"model": "", "input": ["A cat"]},
        VllmPooled,
        {**_HEAD, "id": "pooling-0", "data": [{"index": 0, "object": "pooling", "data": [0.6, -0.8]}], "usage": _USAGE},
    ),
}
"""By the dialect's name."""

_OF_TOKENS = {"model": nullable(TEXT), "add_special_tokens": nullable(FLAG), "return_token_strs": nullable(FLAG)}
_OF_CHATS = {"add_generation_prompt": FLAG, "continue_final_message": FLAG, "chat_template_kwargs": {"type": "object"}}
TOKENIZE_BODIES = (
    record({"prompt": NON_EMPTY}, _OF_TOKENS),
    record({"messages": MESSAGES}, {**_OF_TOKENS, **{name: nullable(shape) for name, shape in _OF_CHATS.items()}}),
)
"""Bodies of /tokenize, which TGI has too."""

_JSON, _TEXT = "application/json", "text/plain"
_REFUSED = (
    _JSON,
    VllmError,
    {"error": {"message": "the adapter sql is not known", "type": "BadRequestError", "param": None, "code": 400}},
)
_MISSING = (
    _JSON,
    VllmError,
    {"error": {"message": "The adapter sql was not found", "type": "NotFoundError", "param": None, "code": 404}},
)
_DOWN = (
    _JSON,
    VllmError,
    {"error": {"message": "the engine is not ready", "type": "ServiceUnavailableError", "param": None, "code": 503}},
)

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/detokenize"): Operation(
        "vLLM",
        "Turn token ids into text",
        {200: (_JSON, VllmText, {"prompt": "Hello"}), 400: _REFUSED},
        body=record({"tokens": listing(COUNT)}, {"model": TEXT}, example={"tokens": [28120]}),
    ),
    ("GET", "/version"): Operation(
        "vLLM",
        "Show vLLM's version if it is the engine, else the server's",
        {200: (_JSON, VllmVersion, {"version": "0.33.0"})},
    ),
    ("GET", "/tokenizer_info"): Operation(
        "vLLM",
        "Show the model's tokenizer_config.json, under option.enable_tokenizer_info_endpoint=true",
        {
            200: (_JSON, dict[str, Any], {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}),
            404: _MISSING,
        },
    ),
    ("GET", "/load"): Operation("vLLM", "Count the requests in flight", {200: (_JSON, VllmLoad, {"server_load": 0})}),
    ("POST", "/v1/load_lora_adapter"): Operation(
        "vLLM",
        "Register a LoRA adapter, under VLLM_ALLOW_RUNTIME_LORA_UPDATING=true",
        {
            200: (_TEXT, str, "Success: LoRA adapter 'sql' added successfully."),
            400: _REFUSED,
            404: _MISSING,
            503: _DOWN,
        },
        body=record(
            {"lora_name": TEXT, "lora_path": TEXT},
            {"load_inplace": FLAG, "is_3d_lora_weight": FLAG},
            example={"lora_name": "sql", "lora_path": "adapters/sql"},
        ),
    ),
    ("POST", "/v1/unload_lora_adapter"): Operation(
        "vLLM",
        "Unregister a LoRA adapter, under VLLM_ALLOW_RUNTIME_LORA_UPDATING=true",
        {
            200: (_TEXT, str, "Success: LoRA adapter 'sql' removed successfully."),
            400: _REFUSED,
            404: _MISSING,
            503: _DOWN,
        },
        body=record({"lora_name": TEXT}, {"lora_int_id": COUNT}, example={"lora_name": "sql"}),
    ),
}
