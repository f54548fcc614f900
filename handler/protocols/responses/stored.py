"""Responses that are kept: `store`, `previous_response_id` and references to items, where the server keeps any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from handler.core.errors import InvalidPayload, NotKept
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.kept import Keeper, Keeping, Wanted, kept_items, too_long
from handler.protocols.kernel.validation import Named
from handler.protocols.responses.answers import DeletedResponse, ResponseHead, ResponseItems
from handler.protocols.responses.messages import referenced, with_ids

KEPT = ("store", "previous_response_id")
"""A body's names that are refused where nothing is kept."""

MAX_REFERENCES = 1000
"""References to items in a request."""

MAX_PAGE, PAGE = 100, 20
"""Input items of a page: the most, and how many by default."""


def read_wanted(body: Any, *, keeps: bool) -> Wanted | None:
    """Return what a body needs of the responses that are kept; what is wrong with it `parse` says.

    Args:
        keeps: its own answer is kept, unless it says otherwise.

    Raises:
        InvalidPayload: it has too many references.
    """
    if not isinstance(body, dict):
        return None
    previous, given = body.get("previous_response_id"), body.get("input")
    items = dict.fromkeys(filter(None, map(referenced, given))) if isinstance(given, list) else {}
    if len(items) > MAX_REFERENCES:
        raise InvalidPayload(f"'input' refers to {len(items)} stored items; at most {MAX_REFERENCES}")
    return Wanted(
        "response", keeps and body.get("store") is not False, previous if isinstance(previous, str) else "", [*items]
    )


def read_kept(body: Mapping[str, Any], context: ServerContext) -> bool:
    """Read `store` and `previous_response_id`; return whether the response is to be kept.

    Raises:
        ServingError: the response before cannot be gone on from.
    """
    if context.keeper is None:
        return False
    store = Named("store", body.get("store"))
    if store.value is not None and not isinstance(store.value, bool):
        raise store.refused("must be true or false")
    previous = Named("previous_response_id", body.get("previous_response_id"))
    if previous.value is not None and (not isinstance(previous.value, str) or not previous.value):
        raise previous.refused("must be the id of a response")
    state = context.recalled.state
    if state == "missing":
        raise NotKept(f"{previous}: no such response is stored: it has expired, or was deleted or not stored", KEPT[1])
    if state == "broken":
        raise NotKept(f"{previous}: a response before it is not stored any more; send all items as input", KEPT[1])
    if state == "in_progress":
        raise previous.refused("this response is still in progress; continue after it has ended")
    if state == "failed":
        raise previous.refused("this response failed; go on from the one before it")
    if state == "too_long":
        field = previous if previous.value else "input"
        raise too_long(field, "the stored items that it names", context.config.max_request_size)
    return store.value is not False


def make_keeping(keeper: Keeper, head: ResponseHead, items: Sequence[Any]) -> Keeping:
    """Return what keeps a response.

    Args:
        items: those of its request, which were read.
    """
    return Keeping(keeper, "response", head["previous_response_id"] or "", kept_items(with_ids(items)))


# -- the other routes --------------------------------------------------------------------------------------------


def not_kept(id: str) -> NotKept:
    """Return the error for a response that its owner does not have."""
    return NotKept(f"Response with id '{id[:128]}' not found.")


def check_retrieval(query: Mapping[str, str]) -> None:
    """Raise InvalidParameter where the query of GET asks for more than the response as it is."""
    if query.get("stream", "false").lower() not in ("false", "0", ""):
        raise Named("stream", query["stream"]).refused("a stored response is not streamed again; leave it out")
    if query.get("starting_after"):
        raise Named("starting_after", query["starting_after"]).refused("a stored response is not streamed again")


def read_page(query: Mapping[str, str]) -> tuple[int, str, bool]:
    """Read `limit`, `after` and whether `order` has the newest items first, as it does by default."""
    limit, order = query.get("limit", str(PAGE)), query.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= MAX_PAGE):
        raise Named("limit", limit).refused(f"must be an integer from 1 to {MAX_PAGE}")
    if order not in ("asc", "desc"):
        raise Named("order", order).refused("must be asc or desc")
    return int(limit), query.get("after", ""), order == "desc"


def deleted(id: str) -> DeletedResponse:
    return {"id": id, "object": "response", "deleted": True}


def page(items: Sequence[Any], *, has_more: bool) -> ResponseItems:
    first, last = (items[0]["id"], items[-1]["id"]) if items else ("", "")
    return {"object": "list", "data": [*items], "first_id": first, "last_id": last, "has_more": has_more}
