"""The bodies of LMI's dialects, TGI_COMPAT among them: rolling batch, dynamic batch, chat."""

from __future__ import annotations

from collections.abc import Callable

from handler.protocols.base import ServerContext
from handler.protocols.lmi import chat
from handler.protocols.openapi.base import Components, Dialect, always
from handler.protocols.openapi.shapes import (
    COUNT,
    FLAG,
    NULL,
    NUMBER,
    TEXT,
    Shape,
    listing,
    nullable,
    parameters,
    record,
    ref,
    request_fields,
)
from handler.protocols.tensors import inputs as tensors

_FINISH = {"enum": ["length", "eos_token", "stop_sequence"]}
_LOGPROB = nullable(NUMBER)
_ADAPTERS = {"anyOf": [TEXT, listing(TEXT), NULL], "description": "The name of a LoRA adapter, or one for each prompt"}


def _lmi_request(inputs: Shape) -> Callable[[ServerContext], Shape]:
    def shape(context: ServerContext) -> Shape:
        known = {**parameters(tensors.TABLE.parameters, context), **request_fields()}
        return record(
            {},
            {
                "inputs": {**nullable(inputs), "description": "May be absent where parameters.input_ids stands for it"},
                "parameters": {"type": ["object", "null"], "properties": known, "description": "null means absent"},
                "stream": nullable(FLAG),
                "adapters": _ADAPTERS,
            },
        )

    return shape


def _chat_request(context: ServerContext) -> Shape:
    part = record({"type": {"const": "text"}, "text": TEXT})
    message = record(
        {"role": {"enum": ["system", "user", "assistant"]}, "content": {"anyOf": [TEXT, listing(part, minItems=1)]}}
    )
    known = {**parameters(chat.TABLE.parameters, context), "stream": nullable(FLAG), "adapters": _ADAPTERS}
    return record({"messages": listing(message, minItems=1)}, known)


_OUTPUTS = {"type": "object", "description": "Output tensors, by name"}
_LMI_TOKEN = record({"id": {"type": "integer"}, "text": TEXT, "log_prob": _LOGPROB}, {"special_token": FLAG})
_TGI_TOKEN = record({"id": {"type": "integer"}, "text": TEXT, "logprob": _LOGPROB, "special": FLAG})
_PROBABILITY = record({"token": TEXT, "logprob": _LOGPROB, "bytes": nullable(listing(COUNT))})
_PROBABILITIES = nullable(
    record(
        {"content": listing(record({**_PROBABILITY["properties"], "top_logprobs": listing(ref("ChatTokenChoice"))}))}
    )
)


def _details(token: Shape, beside: dict[str, Shape]) -> Shape:
    """LMI's and TGI's details have the same names; a stream's have fewer."""
    tokens = listing(token)
    more = {
        "inputs": TEXT,
        "tokens": tokens,
        "prefill": listing({"type": "object"}),
        "top_tokens": listing(tokens),
        "input_length": COUNT,
        "best_of_sequences": listing({"type": "object"}),
    }
    return record({"finish_reason": _FINISH, "generated_tokens": COUNT, **beside}, more)


_USAGE = record({"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT})


def _chat_answer(kind: str, choice: dict[str, Shape], *, whole: bool) -> Shape:
    shared = {"index": COUNT, "logprobs": _PROBABILITIES, "finish_reason": nullable(_FINISH)}
    choices = listing(record({**shared, **choice}))
    head = {"id": TEXT, "object": {"const": kind}, "created": COUNT, "choices": choices}
    return record({**head, "usage": _USAGE}) if whole else record(head, {"usage": nullable(_USAGE)})


_FAILED = {"error": TEXT, "code": COUNT}

COMPONENTS: Components = {
    "LmiRequest": _lmi_request({"type": "string", "minLength": 1}),
    "LmiToken": always(_LMI_TOKEN),
    "LmiDetails": always(_details(ref("LmiToken"), {})),
    "LmiAnswer": always(record({"generated_text": TEXT}, {"details": ref("LmiDetails"), "outputs": _OUTPUTS})),
    "LmiLine": always(
        record(
            {"token": ref("LmiToken")},
            {
                "top_tokens": listing(ref("LmiToken")),
                "generated_text": TEXT,
                "details": {"anyOf": [ref("LmiDetails"), ref("LmiFailedDetails")]},
                "outputs": _OUTPUTS,
                **_FAILED,
            },
        )
    ),
    "LmiFailedDetails": always(record({"finish_reason": {"const": "error"}})),
    "LmiError": always(
        record(_FAILED, {"generated_text": TEXT, "details": ref("LmiFailedDetails"), "type": TEXT, "message": TEXT})
    ),
    "TgiToken": always(_TGI_TOKEN),
    "TgiDetails": always(_details(ref("TgiToken"), {"seed": nullable(COUNT)})),
    "TgiAnswer": always(
        listing(
            record({"generated_text": TEXT}, {"details": nullable(ref("TgiDetails")), "outputs": _OUTPUTS}),
            minItems=1,
            maxItems=1,
        )
    ),
    "TgiEvent": always(
        {
            "anyOf": [
                record(
                    {
                        "index": {"type": "integer", "minimum": 1},
                        "token": ref("TgiToken"),
                        "generated_text": nullable(TEXT),
                        "details": nullable(ref("TgiDetails")),
                    },
                    {"top_tokens": listing(ref("TgiToken")), "outputs": _OUTPUTS},
                ),
                ref("TgiError"),
            ]
        }
    ),
    "TgiError": always(record({"error": TEXT, "error_type": TEXT}, {"code": COUNT})),
    "BatchRequest": _lmi_request({"anyOf": [TEXT, listing({"type": "string", "minLength": 1}, minItems=1)]}),
    "BatchAnswer": always(listing(record({"generated_text": TEXT}))),
    "BatchLine": always({"anyOf": [record({"outputs": listing(TEXT)}), ref("BatchError")]}),
    "BatchError": always(record({"code": COUNT, "message": TEXT, "error": TEXT})),
    "ChatRequest": _chat_request,
    "ChatTokenChoice": always(_PROBABILITY),
    "ChatAnswer": always(
        _chat_answer(
            "chat.completion",
            {"message": record({"role": {"const": "assistant"}, "content": TEXT})},
            whole=True,
        )
    ),
    "ChatChunk": always(
        {
            "anyOf": [
                _chat_answer(
                    "chat.completion.chunk", {"delta": record({}, {"role": TEXT, "content": TEXT})}, whole=False
                ),
                ref("LmiError"),
                ref("TgiError"),
            ]
        }
    ),
    "FrontEndError": always(record({"code": COUNT, "type": TEXT, "message": TEXT}, {"error": TEXT})),
}

_INPUTS = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 8, "details": True}}
_MESSAGES = {"messages": [{"role": "user", "content": "Name the capital of France."}], "max_tokens": 16}
_LMI_ANSWERED = {
    "generated_text": " Paris.",
    "details": {
        "finish_reason": "eos_token",
        "generated_tokens": 2,
        "inputs": "The capital of France is",
        "tokens": [
            {"id": 7042, "text": " Paris.", "log_prob": -0.4},
            {"id": 2, "text": "", "log_prob": -0.1, "special_token": True},
        ],
    },
}
_TGI_ANSWERED = [
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
_CHAT_ANSWERED = {
    "id": "chatcmpl-0",
    "object": "chat.completion",
    "created": 1760000000,
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Paris."},
            "logprobs": None,
            "finish_reason": "eos_token",
        }
    ],
    "usage": {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15},
}
_LINES, _EVENTS = "application/jsonlines", "text/event-stream"


def _chat(error: str, streams: tuple[str, ...]) -> Dialect:
    return Dialect("Chat", "ChatRequest", "ChatAnswer", error, _MESSAGES, _CHAT_ANSWERED, "ChatChunk", streams)


DIALECTS: dict[str, Dialect] = {
    "lmi": Dialect(
        "LMI", "LmiRequest", "LmiAnswer", "LmiError", _INPUTS, _LMI_ANSWERED, "LmiLine", (_LINES, _EVENTS),
        refuses_in_frame=True,
    ),
    "lmi_chat": _chat("LmiError", (_LINES, _EVENTS)),
    "tgi_compat": Dialect(
        "TGI_COMPAT", "LmiRequest", "TgiAnswer", "TgiError", _INPUTS, _TGI_ANSWERED, "TgiEvent", (_EVENTS,)
    ),
    "tgi_compat_chat": _chat("TgiError", (_EVENTS,)),
    "dynamic_batch": Dialect(
        "Dynamic batch", "BatchRequest", "BatchAnswer", "BatchError",
        {"inputs": ["One, two,", "A, B,"], "parameters": {"max_new_tokens": 8}},
        [{"generated_text": " three,"}, {"generated_text": " C,"}], "BatchLine", (_LINES,),
    ),
}  # fmt: skip
