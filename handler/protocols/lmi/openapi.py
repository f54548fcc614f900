"""LMI's bodies in the API's document: rolling batch, dynamic batch, chat; TGI_COMPAT takes the same requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.protocols.kernel.dialect import ServerContext
from handler.protocols.kernel.errors import FrontEndError
from handler.protocols.kernel.parameters import Description, RequestShape, parameters, request_fields, request_shape
from handler.protocols.kernel.schema import TEXT, Shape, listing, nullable, record
from handler.protocols.lmi import asynchronous, chat, request
from handler.protocols.lmi.api import (
    AsyncAnswer,
    AsyncError,
    AsyncFailedLine,
    AsyncLine,
    BatchError,
    BatchFailure,
    BatchLine,
    BatchText,
    LmiAnswer,
    LmiChatAnswer,
    LmiChatChunk,
    LmiError,
    LmiFailedLine,
    LmiLine,
    LmiPayloadError,
)
from handler.protocols.lmi.embedding import LmiEmbedding
from handler.protocols.lmi.request import FIELDS
from handler.protocols.openai.api import OpenAiChatAnswer, OpenAiChatChunk, OpenAiTextAnswer, OpenAiTextChunk
from handler.protocols.tei.api import TeiError, TeiVectors
from handler.protocols.tei.openapi import nested_request


def lmi_request(inputs: Shape) -> RequestShape:
    def shape(context: ServerContext) -> Shape:
        known = {**parameters(request.TABLE.parameters, context), **request_fields()}
        told = {**nullable(inputs), "description": "May be absent where parameters.input_ids stands for it"}
        return record({}, {**FIELDS, "inputs": told, "parameters": {**FIELDS["parameters"], "properties": known}})

    return shape


EXAMPLE = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 8, "details": True}}
_MESSAGES = {"messages": [{"role": "user", "content": "Name the capital of France."}], "max_tokens": 16}
_LMI_ANSWER = {
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
_CHAT_ANSWER = {
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
_ASYNC_ANSWER = {
    "generated_text": " Paris.",
    "details": {
        "finish_reason": "stop",
        "generated_tokens": 2,
        "seed": None,
        "prefill": [],
        "tokens": [{"id": 7042, "text": " Paris.", "logprob": -0.4}, {"id": 2, "text": "", "logprob": -0.1}],
    },
}
_HEAD = {"created": 1760000000, "model": "lmi", "system_fingerprint": "lmi"}
_CHOICE = {
    "index": 0,
    "message": {"role": "assistant", "content": "Paris.", "refusal": None},
    "logprobs": None,
    "finish_reason": "stop",
}
LINES, EVENTS = "application/jsonlines", "text/event-stream"

LMI_REQUEST = lmi_request(FIELDS["inputs"])


def async_request(context: ServerContext) -> Shape:
    known = {
        **parameters(asynchronous.TABLE.parameters, context),
        **request_fields(asynchronous.REQUEST_NAMES),
    }
    fields = asynchronous.FIELDS
    return record({"inputs": fields["inputs"]}, {**fields, "parameters": {**fields["parameters"], "properties": known}})


def chat_description(error: Any, failure: Any, streams: tuple[str, ...]) -> Description:
    """LMI's chat beside a mode, whose errors it has.

    Args:
        error: the type of the mode's errors.
        failure: the type of the last value of a stream that broke off.
    """
    return Description(
        "Chat",
        "ChatRequest",
        request_shape(chat.Chat.fields, chat.TABLE, "messages"),
        error,
        _MESSAGES,
        LmiChatAnswer,
        _CHAT_ANSWER,
        LmiChatChunk | failure,
        streams,
    )


DESCRIPTIONS: Mapping[str, Description] = {
    "lmi": Description(
        "LMI", "LmiRequest", LMI_REQUEST, LmiError, EXAMPLE, LmiAnswer, _LMI_ANSWER, LmiLine | LmiFailedLine,
        (LINES, EVENTS), refuses_in_frame=True,
    ),
    "lmi_chat": chat_description(LmiError, LmiFailedLine, (LINES, EVENTS)),
    "dynamic_batch_chat": chat_description(BatchError, BatchFailure, (LINES, EVENTS)),
    "dynamic_batch": Description(
        "Dynamic batch", "BatchRequest",
        lmi_request({"anyOf": [TEXT, listing({"type": "string", "minLength": 1}, minItems=1)]}), BatchError,
        {"inputs": ["One, two,", "A, B,"], "parameters": {"max_new_tokens": 8}},
        list[BatchText], [{"generated_text": " three,"}, {"generated_text": " C,"}], BatchLine | BatchError, (LINES,),
    ),
    "lmi_async": Description(
        "LMI async", "LmiAsyncRequest", async_request, AsyncError, EXAMPLE, AsyncAnswer, _ASYNC_ANSWER,
        AsyncLine | AsyncFailedLine, (LINES,),
    ),
    "lmi_async_chat": Description(
        "LMI async chat", "LmiAsyncChatRequest",
        request_shape(asynchronous.AsyncChat.fields, asynchronous.AsyncChat.table, "messages"), AsyncError,
        {"model": "lmi", **_MESSAGES}, OpenAiChatAnswer, {**_CHAT_ANSWER, **_HEAD, "choices": [_CHOICE]},
        OpenAiChatChunk | AsyncFailedLine, (LINES,),
    ),
    "lmi_async_completions": Description(
        "LMI async completions", "LmiAsyncCompletionRequest",
        request_shape(asynchronous.AsyncCompletions.fields, asynchronous.AsyncCompletions.table, "prompt"), AsyncError,
        {"model": "lmi", "prompt": "The capital of France is", "max_tokens": 8}, OpenAiTextAnswer,
        {**_HEAD, "id": "cmpl-0", "object": "text_completion", "usage": _CHAT_ANSWER["usage"],
         "choices": [{"index": 0, "text": " Paris.", "logprobs": None, "finish_reason": "stop"}]},
        OpenAiTextChunk | AsyncFailedLine, (LINES,),
    ),
    "lmi_embedding": Description(
        "LMI embedding", "LmiEmbeddingRequest", nested_request(LmiEmbedding),
        LmiPayloadError | FrontEndError | TeiError,
        {"inputs": "What is deep learning?"}, list[float] | TeiVectors, [0.6, -0.8],
    ),
}  # fmt: skip
"""By the dialect's name."""
