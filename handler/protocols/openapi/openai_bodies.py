"""The bodies of OpenAI's routes: parameters from their tables, the rest as OpenAI's clients have it."""

from __future__ import annotations

from collections.abc import Mapping

from handler.protocols.base import ServerContext
from handler.protocols.openai.completions import MAX_PROMPTS
from handler.protocols.openai.parameters import CHAT, COMPLETIONS
from handler.protocols.openai.tools.request import MAX_TOOLS
from handler.protocols.openapi.base import Components, Dialect, always
from handler.protocols.openapi.shapes import (
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    Shape,
    listing,
    nullable,
    parameters,
    record,
    ref,
)

_FINISH = nullable({"enum": ["stop", "length", "tool_calls", "content_filter", "function_call"]})
_STREAM = {
    "model": {**nullable(TEXT), "description": "The model's or an adapter's name; empty or an http address: the model"},
    "stream": nullable(FLAG),
    "stream_options": nullable(record({}, {"include_usage": nullable(FLAG)})),
}
_USAGE = record({"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT})
_CALL = record({"function": record({}, {"name": TEXT, "arguments": TEXT})}, {"id": TEXT, "type": TEXT, "index": COUNT})
_MESSAGE = record(
    {"role": {"enum": ["system", "developer", "user", "assistant", "tool"]}},
    {
        "content": {"anyOf": [TEXT, listing({"type": "object"}), {"type": "null"}]},
        "tool_calls": nullable(listing(_CALL)),
    },
)
_PROBABILITIES = nullable(record({"content": listing({"type": "object"})}))
_COLUMNS = nullable(
    record(
        {
            "tokens": listing(TEXT),
            "token_logprobs": listing(nullable(NUMBER)),
            "top_logprobs": {"type": ["array", "null"]},
            "text_offset": listing(COUNT),
        }
    )
)


def _chat_request(context: ServerContext) -> Shape:
    tool = record(
        {
            "type": {"const": "function"},
            "function": record({"name": TEXT}, {"parameters": {"type": ["object", "null"]}}),
        }
    )
    more = {
        "tools": nullable(listing(tool, maxItems=MAX_TOOLS)),
        "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}, {"type": "null"}]},
        "parallel_tool_calls": nullable(FLAG),
    }
    return record(
        {"messages": listing(_MESSAGE, minItems=1)}, {**_STREAM, **parameters(CHAT.parameters, context), **more}
    )


def _completion_request(context: ServerContext) -> Shape:
    ids = listing(COUNT, minItems=1)
    several = listing({"anyOf": [TEXT, ids]}, minItems=1, maxItems=MAX_PROMPTS)
    known = parameters(COMPLETIONS.parameters, context)
    return record({"prompt": {"anyOf": [{**TEXT, "minLength": 1}, ids, several]}}, {**_STREAM, **known})


def _answer(kind: str, choice: Mapping[str, Shape], *, whole: bool) -> Shape:
    choices = listing(record({"index": COUNT, **choice, "finish_reason": _FINISH}))
    head = {"id": TEXT, "object": {"const": kind}, "created": COUNT, "model": TEXT, "system_fingerprint": TEXT}
    usage = {"usage": _USAGE}
    return record(
        {**head, "choices": choices, **(usage if whole else {})}, {} if whole else {"usage": nullable(_USAGE)}
    )


def _or_error(shape: Shape) -> Shape:
    return {"anyOf": [shape, ref("OpenAiError")]}


COMPONENTS: Components = {
    "OpenAiChatRequest": _chat_request,
    "OpenAiChatAnswer": always(
        _answer(
            "chat.completion",
            {
                "message": record({"role": TEXT, "content": nullable(TEXT)}, {"tool_calls": listing(_CALL)}),
                "logprobs": _PROBABILITIES,
            },
            whole=True,
        )
    ),
    "OpenAiChatChunk": always(
        _or_error(
            _answer(
                "chat.completion.chunk",
                {
                    "delta": record(
                        {}, {"role": TEXT, "content": nullable(TEXT), "tool_calls": nullable(listing(_CALL))}
                    ),
                    "logprobs": _PROBABILITIES,
                },
                whole=False,
            )
        )
    ),
    "OpenAiCompletionRequest": _completion_request,
    "OpenAiCompletionAnswer": always(_answer("text_completion", {"text": TEXT, "logprobs": _COLUMNS}, whole=True)),
    "OpenAiCompletionChunk": always(
        _or_error(_answer("text_completion", {"text": TEXT, "logprobs": _COLUMNS}, whole=False))
    ),
    "OpenAiError": always(
        record({"error": record({"message": TEXT, "type": TEXT, "param": nullable(TEXT), "code": nullable(TEXT)})})
    ),
}

_HEAD = {"id": "cmpl-0", "created": 1760000000, "model": "model", "system_fingerprint": "lmi"}
_USED = {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}
_SAID = {"role": "assistant", "content": "Paris.", "refusal": None}

DIALECTS: Mapping[str, Dialect] = {
    "openai_chat": Dialect(
        "OpenAI chat", "OpenAiChatRequest", "OpenAiChatAnswer", "OpenAiError",
        {"model": "", "messages": [{"role": "user", "content": "Name the capital of France."}], "max_tokens": 16},
        {**_HEAD, "object": "chat.completion", "usage": _USED,
         "choices": [{"index": 0, "message": _SAID, "logprobs": None, "finish_reason": "stop"}]},
        "OpenAiChatChunk", ("text/event-stream",),
    ),
    "openai_completions": Dialect(
        "OpenAI completions", "OpenAiCompletionRequest", "OpenAiCompletionAnswer", "OpenAiError",
        {"model": "", "prompt": "The capital of France is", "max_tokens": 8},
        {**_HEAD, "object": "text_completion", "usage": _USED,
         "choices": [{"index": 0, "text": " Paris.", "logprobs": None, "finish_reason": "stop"}]},
        "OpenAiCompletionChunk", ("text/event-stream",),
    ),
}  # fmt: skip
