"""A response's bodies in the API's document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.core.framing import SSE
from handler.protocols.kernel.description import Description, request_shape
from handler.protocols.openai.answers import OpenAiError
from handler.protocols.responses.answers import OpenAiResponse, OpenAiResponseEvent
from handler.protocols.responses.parameters import TABLE
from handler.protocols.responses.request import FIELDS

_MESSAGE: dict[str, Any] = {
    "id": "msg_0",
    "type": "message",
    "status": "completed",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "Paris.", "annotations": [], "logprobs": []}],
}
_USAGE = {
    "input_tokens": 12,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens": 3,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 15,
}
_ANSWER = {
    "id": "resp_0", "object": "response", "created_at": 1760000000, "model": "model", "background": False,
    "frequency_penalty": 0.0, "instructions": None, "max_output_tokens": 16, "max_tool_calls": None, "metadata": {},
    "parallel_tool_calls": True, "presence_penalty": 0.0, "previous_response_id": None, "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None}, "safety_identifier": None, "service_tier": "default",
    "store": False, "temperature": 1.0, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [],
    "top_logprobs": 0, "top_p": 1.0, "truncation": "disabled", "user": None, "status": "completed",
    "completed_at": 1760000001, "error": None, "incomplete_details": None, "output": [_MESSAGE], "usage": _USAGE,
}  # fmt: skip

DESCRIPTIONS: Mapping[str, Description] = {
    "openai_responses": Description(
        "OpenAI responses",
        "OpenAiResponsesRequest",
        request_shape(FIELDS, TABLE, "input"),
        OpenAiError,
        {"model": "", "input": "Name the capital of France.", "max_output_tokens": 16},
        OpenAiResponse,
        _ANSWER,
        OpenAiResponseEvent | OpenAiError,
        (SSE.content_type,),
    ),
}
"""By the dialect's name."""
