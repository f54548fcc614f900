"""OpenAI's conversations: the bodies of their routes, and their stored form.

Sources: OpenAI's API reference, "Conversations"; the types of its Python client, 3.57.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.errors import InvalidPayload
from handler.core.media import MediaSource
from handler.protocols.kernel.body import report_unknown
from handler.protocols.kernel.context import RequestContext, ServerContext
from handler.protocols.kernel.path import Path
from handler.protocols.kernel.readers import NamedValue, metadata
from handler.protocols.kernel.stored import CONVERSATION, KeptItem, kept_items
from handler.protocols.responses import recorded
from handler.protocols.responses.api import Conversation, DeletedConversation
from handler.protocols.responses.chat import InputReader, item_path
from handler.protocols.responses.response import secret_id
from handler.protocols.responses.stored import check_ids, with_ids
from handler.protocols.responses.types import INCLUDED, REFUSED, TRIGGER, meaning_of

MAX_ITEMS = 20
"""The maximum number of items that a call adds to a conversation."""


class NewItems(NamedTuple):
    """Items that a body adds to a conversation.

    Attributes:
        items: the items as they are stored.
        kept: the same items as JSON.
        ignored: names in the body that have no effect.
        media: the media in the items.
    """

    items: Sequence[dict[str, Any]]
    kept: Sequence[KeptItem]
    ignored: Sequence[str]
    media: Sequence[MediaSource]


_REFUSED: Mapping[str, str] = {
    **REFUSED,
    "item_reference": "is not supported in a conversation: send the item itself",
    TRIGGER: "is not supported in a conversation: send it in a response",
}
"""What is said of items that conversations do not contain, by type."""


class _ItemsReader(InputReader):
    """Checks items for a conversation."""

    field = "items"
    refused = _REFUSED

    def check(self, items: Iterable[tuple[Path, Any]]) -> Sequence[MediaSource]:
        """Check items in the same way as a request's input, and return the media in them.

        Raises:
            InvalidPayload: an item is invalid. The message contains its path.
        """
        for at, item in items:
            self._item(item, at)
        self._add_shown()
        self._join_turns()
        return self.conversation().media


def read_body(body: Any, *names: str) -> Mapping[str, Any]:
    """Return a body.

    Raises:
        InvalidPayload: the body is not an object.
    """
    if not isinstance(body, dict):
        raise InvalidPayload(f"the body must be a JSON object with {' and '.join(repr(name) for name in names)}")
    return body


def has_outputs(body: Any) -> bool:
    """Return whether a body adds outputs. Their calls may already be in the conversation."""
    items = body.get("items") if isinstance(body, dict) else None
    return isinstance(items, list) and any(meaning_of(item).endswith("output") for item in items)


def calls_in(items: Sequence[Any]) -> dict[str, str]:
    """Return the types of the calls among the items of a conversation, by the ids of the calls."""
    calls = {}
    for item in items:
        meaning = meaning_of(item)
        if meaning == "call":
            calls[item["call_id"]] = item["type"]
        elif meaning == "recorded_call" and (id := recorded.id_of(item)):
            calls[id] = item["type"]
    return calls


def read_items(
    body: Mapping[str, Any], context: ServerContext, owner: str, calls: Mapping[str, str], *, required: bool = True
) -> NewItems:
    """Read `items`.

    Args:
        owner: owner of the API key in the request.
        calls: the types of the calls in the conversation by their ids.
        required: whether the body must contain items.

    Raises:
        InvalidParameter, InvalidPayload: an item is invalid. The message contains its path.
    """
    items = body.get("items")
    if items is None and not required:
        items = []
    if not isinstance(items, list):
        raise InvalidPayload("'items' must be a list of items")
    if len(items) > MAX_ITEMS:
        raise InvalidPayload(f"'items' has {len(items)} items; the maximum is {MAX_ITEMS}")
    reader = _ItemsReader(context, RequestContext(owner=owner), calls)
    media = reader.check((item_path("items", index), item) for index, item in enumerate(items))
    check_ids(items, "items")
    ignored = report_unknown(body, ("items", "metadata"), context, reader.unknown)
    kept = with_ids(items)
    return NewItems(kept, kept_items(kept), ignored, media)


def check_item(
    item: Any, at: str, context: ServerContext, owner: str, calls: Mapping[str, str]
) -> Sequence[MediaSource]:
    """Check one item that is added to a conversation, and return the media in it.

    Args:
        at: path of the item for error messages.
        calls: as for `read_items`.

    Raises:
        InvalidParameter, InvalidPayload: the item is invalid.
    """
    return _ItemsReader(context, RequestContext(owner=owner), calls).check([(item_path("items", at), item)])


def read_metadata(body: Mapping[str, Any]) -> dict[str, str]:
    """Read `metadata`.

    Raises:
        InvalidParameter: it has too many pairs, or a pair is too long.
    """
    value = NamedValue("metadata", body.get("metadata"))
    value.optional(metadata)
    return value.value or {}


def check_include(values: Sequence[str]) -> None:
    """Check the values of `include` in a query, which have no effect.

    Raises:
        InvalidParameter: a value is unknown.
    """
    for value in values:
        if value not in INCLUDED:
            raise NamedValue("include", value).refused(f"must be one of {', '.join(INCLUDED)}")


def new_conversation(metadata: dict[str, str]) -> Conversation:
    return {
        "id": secret_id(CONVERSATION.removesuffix("_")),
        "object": "conversation",
        "created_at": int(time.time()),
        "metadata": metadata,
    }


def deleted_conversation(id: str) -> DeletedConversation:
    return {"id": id, "object": "conversation.deleted", "deleted": True}
