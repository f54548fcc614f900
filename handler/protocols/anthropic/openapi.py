"""Anthropic's bodies in the API's document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from handler.core.errors import InvalidParameter
from handler.core.framing import SSE
from handler.protocols.anthropic.api import (
    AnthropicCount,
    AnthropicError,
    AnthropicMessage,
    AnthropicModel,
    AnthropicModels,
    MessageEvent,
)
from handler.protocols.anthropic.request import FIELDS, TABLE
from handler.protocols.anthropic.threads import THREAD
from handler.protocols.kernel.parameters import Description, RequestShape, request_shape
from handler.protocols.kernel.readers import show

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
        MessageEvent | AnthropicError, (SSE.content_type,),
    ),
    "anthropic_count": Description(
        "Anthropic token count", "AnthropicCountRequest", _request("messages"), AnthropicError,
        _ASK,
        AnthropicCount, {"input_tokens": 12},
    ),
}  # fmt: skip
"""By the dialect's name."""


# -- the list of models, for clients that send its header `anthropic-version` ------------------------------------------


VERSION_HEADER = "anthropic-version"
"""What Anthropic's clients send with each request, and no others."""

_LIMIT, _MOST = 20, 1000


def model(id: str, created: float, max_tokens: int | None) -> AnthropicModel:
    """Describe a model.

    Args:
        created: seconds since 1970.
        max_tokens: of a request; None where that is not known yet.
    """
    at = datetime.fromtimestamp(int(created), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "type": "model",
        "id": id,
        "display_name": id,
        "created_at": at,
        "lifecycle": "active",
        "max_input_tokens": max_tokens,
    }


def page(models: Sequence[AnthropicModel], query: Mapping[str, str]) -> AnthropicModels:
    """Return a page of the models.

    Args:
        query: `limit` of the page, and `after_id` or `before_id`, next to which it stands.

    Raises:
        InvalidParameter: one of them is wrong.
    """
    given = query.get("limit", str(_LIMIT))
    if not (given.isascii() and given.isdecimal() and len(given) < 5 and 1 <= int(given) <= _MOST):
        raise InvalidParameter(f"limit={show(given)}: must be a whole number of at least 1 and at most {_MOST}")
    limit, ids = int(given), [one["id"] for one in models]
    if "before_id" in query:
        end = _place(ids, "before_id", query)
        first = max(0, end - limit)
        has_more = first > 0
    else:
        first = _place(ids, "after_id", query) + 1 if "after_id" in query else 0
        end = first + limit
        has_more = end < len(ids)
    data = list(models[first:end])
    return {
        "data": data,
        "has_more": has_more,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


def _place(ids: Sequence[str], name: str, query: Mapping[str, str]) -> int:
    if query[name] not in ids:
        raise InvalidParameter(f"{name}={show(query[name])}: there is no such model")
    return ids.index(query[name])
