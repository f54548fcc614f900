"""TGI's, TGI_COMPAT's and MindIE's bodies, and TGI's other routes, in the API's document."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from handler import __version__
from handler.protocols.kernel.dialect import ServerContext
from handler.protocols.kernel.parameters import Description, Operation, RequestShape
from handler.protocols.kernel.schema import Shape, nullable, record, ref
from handler.protocols.lmi.openapi import EVENTS, EXAMPLE, LINES, LMI_REQUEST, chat_description
from handler.protocols.tgi.api import (
    UNHEALTHY,
    MindieAnswer,
    MindieError,
    MindieEvent,
    TgiAnswer,
    TgiChatPieces,
    TgiError,
    TgiEvent,
    TgiInfo,
    TgiList,
    TgiPiece,
)
from handler.protocols.tgi.mindie import KINDS, MAX_CHARACTERS, MINDIE_TOP_LEVEL
from handler.protocols.tgi.native import PARAMETERS, TOP_LEVEL, Kind
from handler.protocols.vllm.api import VllmTokens
from handler.protocols.vllm.openapi import TOKENIZE_BODIES


def _fields(kinds: Mapping[str, Kind], context: ServerContext) -> dict[str, Shape]:
    fields = {}
    for name, kind in kinds.items():
        shape = dict(kind.schema)
        if why := context.unsupported.get(_SETS.get(name, name)):
            shape["description"] = f"Refused: the engine {context.engine} lacks it: {why}"
        fields[name] = nullable(shape) if kind.null else shape
    return fields


_SETS = {"grammar": "structured_output", "top_n_tokens": "top_logprobs", "decoder_input_details": "prompt_logprobs"}
"""TGI's name -> the Sampling field, where they differ."""


def _request(top_level: Mapping[str, Kind], kinds: Mapping[str, Kind], context: ServerContext, **inputs: int) -> Shape:
    """Return the schema of a body; `inputs` are its bounds."""
    fields = _fields(top_level, context)
    text = {**fields.pop("inputs"), "minLength": 1, **inputs}
    return record(
        {"inputs": text}, {**fields, "parameters": {**fields["parameters"], "properties": _fields(kinds, context)}}
    )


_TGI: RequestShape = partial(_request, TOP_LEVEL, PARAMETERS)
_MINDIE: RequestShape = partial(_request, MINDIE_TOP_LEVEL, KINDS, maxLength=MAX_CHARACTERS)

_EXAMPLE = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 8, "details": True}}
_ANSWER = {
    "generated_text": " Paris.",
    "details": {
        "finish_reason": "length",
        "generated_tokens": 1,
        "seed": None,
        "prefill": [],
        "tokens": [{"id": 7042, "text": " Paris.", "logprob": -0.4, "special": False}],
    },
}
_MINDIE_ANSWER = {
    "generated_text": " Paris.",
    "details": {
        "prompt_tokens": 5,
        "finish_reason": "length",
        "generated_tokens": 1,
        "seed": None,
        "prefill": [],
        "tokens": [{"id": 7042, "text": " Paris.", "logprob": None, "special": None}],
    },
}
_EVENTS = ("text/event-stream",)
_COMPAT_ANSWER = [
    {
        "generated_text": " Paris.",
        "details": {
            "finish_reason": "eos_token",
            "generated_tokens": 2,
            "seed": None,
            "prefill": [],
            "inputs": "The capital of France is",
            "tokens": [
                {"id": 7042, "text": " Paris.", "logprob": -0.4, "special": False},
                {"id": 2, "text": "", "logprob": -0.1, "special": True},
            ],
        },
    }
]


def _tgi(title: str, answer: Any, example: Any, streams: tuple[str, ...]) -> Description:
    chunk = TgiEvent | TgiError if streams else None
    return Description(title, "TgiGenerateRequest", _TGI, TgiError, _EXAMPLE, answer, example, chunk, streams)


DESCRIPTIONS: Mapping[str, Description] = {
    "tgi_compat": Description(
        "TGI_COMPAT", "LmiRequest", LMI_REQUEST, TgiError, EXAMPLE, TgiList, _COMPAT_ANSWER, TgiEvent | TgiError,
        _EVENTS,
    ),
    "tgi_compat_chat": chat_description(TgiError, TgiError, (LINES, EVENTS)),
    "tgi": _tgi("TGI", TgiList, [_ANSWER], _EVENTS),
    "tgi_generate": _tgi("TGI", TgiAnswer, _ANSWER, ()),
    "tgi_generate_stream": _tgi("TGI", None, None, _EVENTS),
    "mindie": Description(
        "MindIE", "MindieRequest", _MINDIE, MindieError, _EXAMPLE, MindieAnswer, _MINDIE_ANSWER,
        MindieEvent | MindieError, _EVENTS,
    ),
}  # fmt: skip
"""By the dialect's name."""

# -- other routes ------------------------------------------------------------------------------------------------

_JSON, _TEXT = "application/json", "text/plain"

_UNHEALTHY = (_JSON, TgiError, UNHEALTHY)
_INFO_EXAMPLE: TgiInfo = {
    "model_id": "model", "model_sha": None, "model_pipeline_tag": "text-generation", "max_concurrent_requests": 1032,
    "max_best_of": 2, "max_stop_sequences": 4, "max_input_tokens": 8191, "max_total_tokens": 8192,
    "validation_workers": 2, "max_client_batch_size": 256, "router": "lmi-handler", "version": __version__, "sha": None,
    "docker_label": None, "default_sampling_params": {"temperature": 0.6, "top_p": 0.9},
}  # fmt: skip
_PIECES_EXAMPLE = [{"id": 28120, "text": "Hello", "start": 0, "stop": 5}]

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("GET", "/info"): Operation(
        "TGI", "Describe what the server serves, and its limits", {200: (_JSON, TgiInfo, _INFO_EXAMPLE)}
    ),
    ("GET", "/health"): Operation(
        "TGI",
        "Whether the model can serve, as in TGI",
        {200: (_TEXT, str, ""), 503: _UNHEALTHY},
        open=True,
    ),
    ("POST", "/tokenize"): Operation(
        "TGI",
        "Split a prompt into tokens: with their places in its bytes, or by a `prompt` or `messages` as vLLM does",
        {200: (_JSON, list[TgiPiece] | VllmTokens, _PIECES_EXAMPLE)},
        body={"anyOf": [ref("TgiGenerateRequest"), *TOKENIZE_BODIES], "example": {"inputs": "Hello"}},
    ),
    ("POST", "/chat_tokenize"): Operation(
        "TGI",
        "Apply the chat template, and split the result into tokens",
        {200: (_JSON, TgiChatPieces, {"tokenize_response": _PIECES_EXAMPLE, "templated_text": "Hello"})},
        body={**ref("OpenAiChatRequest"), "example": {"messages": [{"role": "user", "content": "Hello"}]}},
    ),
}
