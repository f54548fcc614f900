"""The bodies of TGI's own routes and of MindIE's: fields and types from their tables, ranges from TGI's limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.protocols.base import ServerContext
from handler.protocols.openapi.base import Components, Dialect, always
from handler.protocols.openapi.shapes import COUNT, FLAG, NULL, NUMBER, TEXT, Shape, listing, nullable, record, ref
from handler.protocols.tgi import request
from handler.protocols.tgi.mindie import KINDS, MAX_CHARACTERS
from handler.protocols.tgi.request import MAX_BEST_OF, MAX_STOPS, MAX_TOP_TOKENS, Kind

_TYPES: Mapping[str, Shape] = {
    "usize": {**COUNT, "maximum": (1 << 64) - 1},
    "u32": {**COUNT, "maximum": (1 << 32) - 1},
    "u64": {**COUNT, "maximum": (1 << 64) - 1},
    "i32": {"type": "integer", "maximum": (1 << 31) - 1},
    "f32": NUMBER,
    "a boolean": FLAG,
    "a string": TEXT,
    "a sequence": listing(TEXT),
    "an object": {"type": "object"},
}

_OPEN = {"exclusiveMinimum": 0, "exclusiveMaximum": 1}
_LIMITS: Mapping[str, Shape] = {
    "best_of": {"maximum": MAX_BEST_OF},
    "temperature": {"exclusiveMinimum": 0},
    "repetition_penalty": {"exclusiveMinimum": 0},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "top_k": {"minimum": 1},
    "top_p": _OPEN,
    "typical_p": _OPEN,
    "max_new_tokens": {"minimum": 1},
    "stop": {"maxItems": MAX_STOPS},
    "truncate": {"minimum": 1},
    "top_n_tokens": {"maximum": MAX_TOP_TOKENS},
}
_NOT_LIMITED = {"typical_p", "stop"}
"""Of MindIE, which takes any."""


def _fields(kinds: Mapping[str, Kind], limits: Mapping[str, Shape], context: ServerContext) -> dict[str, Shape]:
    found = {}
    for name, kind in kinds.items():
        shape = {**_TYPES[kind.name], **limits.get(name, {})}
        if why := context.unsupported.get(_SETS.get(name, name)):
            shape["description"] = f"Refused: the engine {context.engine} lacks it: {why}"
        found[name] = nullable(shape) if kind.null else shape
    return found


_SETS = {"grammar": "structured_output", "top_n_tokens": "top_logprobs", "decoder_input_details": "prompt_logprobs"}
"""Fields of Sampling that have other names."""


def _tgi_request(context: ServerContext) -> Shape:
    known = _fields(request.PARAMETERS, _LIMITS, context)
    return record(
        {"inputs": {**TEXT, "minLength": 1}}, {"parameters": {"type": "object", "properties": known}, "stream": FLAG}
    )


def _mindie_request(context: ServerContext) -> Shape:
    limits = {name: limit for name, limit in _LIMITS.items() if name not in _NOT_LIMITED}
    known = _fields(KINDS, limits, context)
    inputs = {**TEXT, "minLength": 1, "maxLength": MAX_CHARACTERS}
    parameters: Shape = {"type": ["object", "null"], "properties": known}
    return record({"inputs": inputs}, {"parameters": parameters, "stream": nullable(FLAG)})


_TGI_TOKEN = ref("TgiToken")
_FINISH = {"enum": ["length", "eos_token", "stop_sequence"]}
_ENDED = {"finish_reason": _FINISH, "generated_tokens": COUNT, "seed": nullable(COUNT)}
_MINDIE_TOKEN = record({"id": COUNT, "text": TEXT, "logprob": nullable(NUMBER), "special": nullable(FLAG)})
_MINDIE_DETAILS = record(
    {**_ENDED, "prompt_tokens": COUNT}, {"prefill": listing({"type": "object"}), "tokens": listing(_MINDIE_TOKEN)}
)

COMPONENTS: Components = {
    "TgiGenerateRequest": _tgi_request,
    "TgiGenerateAnswer": always(record({"generated_text": TEXT}, {"details": ref("TgiDetails")})),
    "MindieRequest": _mindie_request,
    "MindieAnswer": always(record({"generated_text": TEXT}, {"details": _MINDIE_DETAILS})),
    "MindieEvent": always(
        {
            "anyOf": [
                record(
                    {
                        "token": _MINDIE_TOKEN,
                        "generated_text": nullable(TEXT),
                        "details": {"anyOf": [_MINDIE_DETAILS, NULL]},
                    }
                ),
                ref("MindieError"),
            ]
        }
    ),
    "MindieError": always(record({"error": TEXT})),
}

_ASKED = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 8, "details": True}}
_ANSWERED = {
    "generated_text": " Paris.",
    "details": {
        "finish_reason": "length",
        "generated_tokens": 1,
        "seed": None,
        "prefill": [],
        "tokens": [{"id": 7042, "text": " Paris.", "logprob": -0.4, "special": False}],
    },
}
_MINDIE_ANSWERED = {
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


def _tgi(title: str, answer: str, example: Any, streams: tuple[str, ...]) -> Dialect:
    return Dialect(title, "TgiGenerateRequest", answer, "TgiError", _ASKED, example, "TgiEvent", streams)


DIALECTS: Mapping[str, Dialect] = {
    "tgi": _tgi("TGI", "TgiAnswer", [_ANSWERED], _EVENTS),
    "tgi_generate": _tgi("TGI", "TgiGenerateAnswer", _ANSWERED, ()),
    "tgi_generate_stream": _tgi("TGI", "", None, _EVENTS),
    "mindie": Dialect(
        "MindIE", "MindieRequest", "MindieAnswer", "MindieError", _ASKED, _MINDIE_ANSWERED, "MindieEvent", _EVENTS
    ),
}
