"""OpenAI's bodies and other routes in the API's document."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from handler.protocols.assistant.tools.request import MAX_TOOLS
from handler.protocols.kernel.base import ServerContext
from handler.protocols.kernel.json_schema import COUNT, FLAG, TEXT, Shape, listing, nullable, record
from handler.protocols.kernel.parameters import Table
from handler.protocols.kernel.schema.description import Description, Operation, parameters
from handler.protocols.kernel.schema.texts import texts
from handler.protocols.openai import embeddings
from handler.protocols.openai.answers import (
    EmbeddingAnswer,
    OpenAiChatAnswer,
    OpenAiChatChunk,
    OpenAiError,
    OpenAiModel,
    OpenAiModels,
    OpenAiTextAnswer,
    OpenAiTextChunk,
)
from handler.protocols.openai.completions import MAX_PROMPTS
from handler.protocols.openai.parameters import CHAT, COMPLETIONS

_STREAM = {
    "model": {**nullable(TEXT), "description": "The model's or an adapter's name; empty or an http address: the model"},
    "stream": nullable(FLAG),
    "stream_options": nullable(record({}, {"include_usage": nullable(FLAG)})),
}
_CALL = record({"function": record({}, {"name": TEXT, "arguments": TEXT})}, {"id": TEXT, "type": TEXT, "index": COUNT})
_MESSAGE = record(
    {"role": {"enum": ["system", "developer", "user", "assistant", "tool"]}},
    {
        "content": {"anyOf": [TEXT, listing({"type": "object"}), {"type": "null"}]},
        "tool_calls": nullable(listing(_CALL)),
    },
)


def chat_request(table: Table, context: ServerContext) -> Shape:
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
        {"messages": listing(_MESSAGE, minItems=1)}, {**_STREAM, **parameters(table.parameters, context), **more}
    )


def _completion_request(context: ServerContext) -> Shape:
    known = parameters(COMPLETIONS.parameters, context)
    return record({"prompt": texts(MAX_PROMPTS)}, {**_STREAM, **known})


def _embedding_request(context: ServerContext) -> Shape:
    known = parameters(embeddings.TABLE.parameters, context)
    return record({"input": texts()}, {"model": _STREAM["model"], **known})


_HEAD = {"id": "cmpl-0", "created": 1760000000, "model": "model", "system_fingerprint": "lmi"}
_USAGE = {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}
_ANSWER_MESSAGE = {"role": "assistant", "content": "Paris.", "refusal": None}

DESCRIPTIONS: Mapping[str, Description] = {
    "openai_chat": Description(
        "OpenAI chat", "OpenAiChatRequest", partial(chat_request, CHAT), OpenAiError,
        {"model": "", "messages": [{"role": "user", "content": "Name the capital of France."}], "max_tokens": 16},
        OpenAiChatAnswer,
        {**_HEAD, "object": "chat.completion", "usage": _USAGE,
         "choices": [{"index": 0, "message": _ANSWER_MESSAGE, "logprobs": None, "finish_reason": "stop"}]},
        OpenAiChatChunk | OpenAiError, ("text/event-stream",),
    ),
    "openai_completions": Description(
        "OpenAI completions", "OpenAiCompletionRequest", _completion_request, OpenAiError,
        {"model": "", "prompt": "The capital of France is", "max_tokens": 8},
        OpenAiTextAnswer,
        {**_HEAD, "object": "text_completion", "usage": _USAGE,
         "choices": [{"index": 0, "text": " Paris.", "logprobs": None, "finish_reason": "stop"}]},
        OpenAiTextChunk | OpenAiError, ("text/event-stream",),
    ),
    "openai_embeddings": Description(
        "OpenAI embeddings", "OpenAiEmbeddingRequest", _embedding_request, OpenAiError,
        {"model": "", "input": ["What is deep learning?"]},
        EmbeddingAnswer,
        {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [0.6, -0.8]}], "model": "model",
         "usage": {"prompt_tokens": 7, "total_tokens": 7}},
    ),
}  # fmt: skip
"""By the dialect's name."""

# -- other routes ------------------------------------------------------------------------------------------------

_MODEL_EXAMPLE: OpenAiModel = {
    "id": "model", "object": "model", "created": 1760000000, "owned_by": "lmi-handler", "root": "model", "parent": None,
    "max_model_len": 8192,
}  # fmt: skip
_NO_MODEL = {
    "message": "Model not found: other",
    "type": "invalid_request_error",
    "param": "model",
    "code": "model_not_found",
}

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("GET", "/v1/models"): Operation(
        "OpenAI", "The model and its adapters",
        {200: ("application/json", OpenAiModels,
               {"object": "list", "data": [_MODEL_EXAMPLE]})},
    ),
    ("GET", "/v1/models/{id}"): Operation(
        "OpenAI", "The model or an adapter",
        {200: ("application/json", OpenAiModel, _MODEL_EXAMPLE),
         404: ("application/json", OpenAiError, {"error": _NO_MODEL})},
    ),
}  # fmt: skip
