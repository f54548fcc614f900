"""The stored responses and conversations that a request refers to, and what is stored of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from handler.core.errors import InvalidPayload, NotKept
from handler.protocols.kernel.context import RequestContext, ServerContext
from handler.protocols.kernel.readers import NamedValue, boolean, show
from handler.protocols.kernel.stored import Keeper, Keeping, State, Wanted, kept_items, too_long
from handler.protocols.responses.api import ResponseHead, duplicate_item
from handler.protocols.responses.response import secret_id
from handler.protocols.responses.types import BACKGROUND, ITEMS, SEND_ALL, TRIGGER, referenced, type_of

_ITEM_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)

MAX_REFERENCES = 1000
"""The maximum number of item references in a request."""


def read_wanted(body: Any, *, keeps: bool, appends: bool = True) -> Wanted | None:
    """Return the stored responses and items that a body refers to. `parse` reports other errors in the body.

    Args:
        keeps: whether the server stores the response unless the body has `store=false` without `background`.
        appends: whether the response is appended to its conversation.

    Raises:
        InvalidPayload: the body has too many references.
    """
    if not isinstance(body, dict):
        return None
    previous, input, conversation = body.get("previous_response_id"), body.get("input"), conversation_in(body)
    items = dict.fromkeys(filter(None, map(referenced, input))) if isinstance(input, list) else {}
    if len(items) > MAX_REFERENCES:
        raise InvalidPayload(f"'input' refers to {len(items)} stored items; the maximum is {MAX_REFERENCES}")
    keeps = keeps and (body.get("store") is not False or bool(conversation) or body.get(BACKGROUND) is True)
    if previous is not None and conversation:
        previous = conversation = ""  # `read_store` refuses this
    return Wanted(
        "response", keeps, previous if isinstance(previous, str) else "", [*items], conversation,
        appends=appends and keeps and bool(conversation), detaches=body.get(BACKGROUND) is True,
    )  # fmt: skip


def conversation_in(body: Mapping[str, Any]) -> str:
    """Return the id of the conversation in a body, or "" if there is none, or if `read_store` refuses it."""
    value = body.get("conversation")
    id = value["id"] if isinstance(value, dict) and value.keys() == {"id"} else value
    return id if isinstance(id, str) else ""


_REFUSED: Mapping[State, str] = {
    "in_conversation": "this response is part of a conversation; continue it with 'conversation'",
    "in_progress": "this response is still in progress; wait until it has ended",
    "failed": "this response failed; continue from the response before it",
}
_LOST: Mapping[State, str] = {
    "missing": "no such response is stored: it expired, was deleted, or was never stored",
    "broken": f"an earlier response is no longer stored; {SEND_ALL}",
}
"""The reasons why a response cannot be continued, by its state."""


def read_store(body: Mapping[str, Any], context: ServerContext, request_context: RequestContext) -> bool:
    """Read `store`, `previous_response_id` and `conversation`. Return whether the response should be stored.

    Raises:
        InvalidParameter, NotKept: a field is invalid, or the stored responses are missing, unusable or too large.
    """
    if request_context.keeper is None:
        return False
    store = NamedValue("store", body.get("store")).optional(boolean)
    previous = NamedValue("previous_response_id", body.get("previous_response_id"))
    if previous.value is not None and (not isinstance(previous.value, str) or not previous.value):
        raise previous.refused("must be the id of a response")
    conversation = NamedValue("conversation", body.get("conversation"))
    if conversation.value is not None and not conversation_in(body):
        raise conversation.refused("must be the id of a conversation, or an object with its 'id'")
    if conversation.value is not None and previous.value is not None:
        raise conversation.refused("cannot be combined with previous_response_id; omit one of them")
    state = request_context.recalled.state
    if state in _REFUSED:
        raise previous.refused(_REFUSED[state])
    if state in _LOST:
        raise NotKept(f"{previous}: {_LOST[state]}", previous.name)
    if state == "too_long":
        conversation = conversation._replace(value=conversation_in(body))
        field = previous if previous.value else conversation if conversation.value else "input"
        raise too_long(field, "the referenced stored items", context.config.max_request_size)
    return store is not False


def make_keeping(
    keeper: Keeper | None, head: ResponseHead, items: Sequence[Any], history: Sequence[Any], *, stores: bool
) -> Keeping | None:
    """Return the object that stores a response or appends it to its conversation, or None.

    Args:
        items: the input items of the request.
        history: the items that are in the conversation.
        stores: whether the response itself is stored.
    """
    conversation = head.get("conversation")
    if keeper is None or not (stores or conversation):
        return None
    if conversation is None:
        return Keeping(keeper, "response", head["previous_response_id"] or "", kept_items(with_ids(items)))
    check_ids(items, "input", history)
    stored = kept_items(with_ids(item for item in items if type_of(item) != TRIGGER))
    return Keeping(keeper, "response", conversation["id"], stored, stores=stores)


def check_ids(items: Iterable[Any], field: str, taken: Iterable[Any] = ()) -> None:
    """Check the ids of items that are appended to a conversation.

    Args:
        field: name of the field with the items.
        taken: the items that are in the conversation.

    Raises:
        InvalidPayload: an id is invalid, or two items have the same id.
    """
    ids = {item["id"] for item in taken}
    for index, item in enumerate(items):
        id = item.get("id")
        if id in (None, ""):
            continue
        if not isinstance(id, str) or not _ITEM_ID.fullmatch(id):
            raise InvalidPayload(f"{field}[{index}].id={show(id)}: must have 1 to 64 letters, digits, '_', '-', '.'")
        if id in ids:
            raise duplicate_item(id)
        ids.add(id)


def with_ids(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return items in the form in which they are stored, with ids and with the text of messages as parts."""
    return [_with_id(item) for item in items]


def _with_id(item: Mapping[str, Any]) -> dict[str, Any]:
    kind, id = item.get("type") or "message", item.get("id")
    if not isinstance(id, str) or not id:
        id = secret_id(ITEMS[kind].prefix if kind in ITEMS else "item")
    stored = {**item, "type": kind, "id": id}
    if kind == "message" and isinstance(text := item.get("content") or "", str):
        part = {"type": "output_text", "annotations": []} if item["role"] == "assistant" else {"type": "input_text"}
        stored["content"] = [{**part, "text": text}]
    return stored if item.get("status") else {**stored, "status": "completed"}
