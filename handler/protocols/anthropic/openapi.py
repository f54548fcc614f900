"""Anthropic's bodies in the API's document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.core.framing import SSE
from handler.protocols.anthropic.answers import AnthropicCount, AnthropicError, AnthropicMessage, Event
from handler.protocols.anthropic.parameters import TABLE
from handler.protocols.assistant.tools.request import MAX_TOOLS
from handler.protocols.kernel.base import ServerContext
from handler.protocols.kernel.json_schema import FLAG, TEXT, Shape, listing, nullable, record
from handler.protocols.kernel.schema.description import Description, parameters

_CONTENT: Shape = {"anyOf": [TEXT, listing(record({"type": TEXT}), minItems=1)]}
_MESSAGE = record({"role": {"enum": ["user", "assistant", "system"]}, "content": _CONTENT})
_TOOL = record({"name": TEXT, "input_schema": {"type": "object"}}, {"description": nullable(TEXT)})


def _request(context: ServerContext, *required: str) -> Shape:
    known = parameters(TABLE.parameters, context)
    if "max_tokens" in required:
        known["max_tokens"] = {"type": "integer", "minimum": 1}
    more = {
        "model": {**nullable(TEXT), "description": "The model's or an adapter's name; empty: the model"},
        "system": nullable(_CONTENT),
        "stream": nullable(FLAG),
        "tools": nullable(listing(_TOOL, maxItems=MAX_TOOLS)),
        "tool_choice": nullable(record({"type": {"enum": ["auto", "any", "tool", "none"]}})),
        "thinking": nullable(record({"type": {"enum": ["enabled", "adaptive", "disabled"]}})),
    }
    names = {"messages": listing(_MESSAGE, minItems=1), **{name: known.pop(name) for name in required}}
    return record(names, {**known, **more})


def _messages_request(context: ServerContext) -> Shape:
    return _request(context, "max_tokens")


_ASK: dict[str, Any] = {"model": "", "messages": [{"role": "user", "content": "Name the capital of France."}]}
_USAGE = {
    "input_tokens": 12, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 3,
}  # fmt: skip

DESCRIPTIONS: Mapping[str, Description] = {
    "anthropic_messages": Description(
        "Anthropic messages", "AnthropicMessagesRequest", _messages_request, AnthropicError,
        {**_ASK, "max_tokens": 16, "anthropic_version": "any"},
        AnthropicMessage,
        {"id": "msg_0", "type": "message", "role": "assistant", "model": "model",
         "content": [{"type": "text", "text": "Paris."}], "stop_reason": "end_turn", "stop_sequence": None,
         "usage": _USAGE},
        Event | AnthropicError, (SSE.content_type,),
    ),
    "anthropic_count": Description(
        "Anthropic token count", "AnthropicCountRequest", _request, AnthropicError, _ASK,
        AnthropicCount, {"input_tokens": 12},
    ),
}  # fmt: skip
"""By the dialect's name."""
