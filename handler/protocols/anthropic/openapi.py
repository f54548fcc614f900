"""Anthropic's bodies in the API's document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.core.framing import SSE
from handler.protocols.anthropic.answers import AnthropicCount, AnthropicMessage, Event
from handler.protocols.anthropic.errors import AnthropicError
from handler.protocols.anthropic.parameters import TABLE
from handler.protocols.anthropic.request import FIELDS
from handler.protocols.anthropic.threads import THREAD
from handler.protocols.kernel.description import Description, RequestShape, request_shape

_ASK: dict[str, Any] = {"model": "", "messages": [{"role": "user", "content": "Name the capital of France."}]}
_USAGE = {
    "input_tokens": 12,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 0,
    "output_tokens": 3,
}


def _request(*required: str) -> RequestShape:
    """Describe a body, with `thread` where any is kept."""
    kept, others = (
        request_shape({**FIELDS, "thread": THREAD}, TABLE, *required),
        request_shape(FIELDS, TABLE, *required),
    )
    return lambda context: (kept if context.config.stores_responses else others)(context)


DESCRIPTIONS: Mapping[str, Description] = {
    "anthropic_messages": Description(
        "Anthropic messages", "AnthropicMessagesRequest", _request("messages", "max_tokens"),
        AnthropicError,
        {**_ASK, "max_tokens": 16, "anthropic_version": "any"},
        AnthropicMessage,
        {"id": "msg_0", "type": "message", "role": "assistant", "model": "model",
         "content": [{"type": "text", "text": "Paris."}], "stop_reason": "end_turn", "stop_sequence": None,
         "usage": _USAGE},
        Event | AnthropicError, (SSE.content_type,),
    ),
    "anthropic_count": Description(
        "Anthropic token count", "AnthropicCountRequest", _request("messages"), AnthropicError,
        _ASK,
        AnthropicCount, {"input_tokens": 12},
    ),
}  # fmt: skip
"""By the dialect's name."""
