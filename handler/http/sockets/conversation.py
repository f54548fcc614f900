"""The conversation of a realtime session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.errors import ServingError
from handler.core.framing import dumps_decoded
from handler.core.values import new_digits
from handler.http.sockets.settings import EventError
from handler.protocols.kernel.readers import show
from handler.serving.quota import Share

_MAX_ITEMS = 1024  # maximum number of items of a conversation
_CALL = "function_call"

_PARTS = {"user": ("input_text", "input_image"), "system": ("input_text",), "assistant": ("output_text", "text")}
"""Maps roles to the types of their parts."""


class ConversationItem(NamedTuple):
    """An item of a conversation. It is encoded once, because it may be large.

    Attributes:
        event: the item in realtime events, as JSON.
        input: the item in the input of a request for /v1/responses, as JSON.
        call: id of the call that the item is, or "".
        output_of: id of the call whose output the item is, or "".
        is_cut: whether the item is in progress, or a call that was not completed. A prompt has such an item only with
            its output.
    """

    id: str
    event: bytes
    input: bytes
    call: str
    output_of: str
    is_cut: bool = False

    @classmethod
    def of(cls, fields: dict[str, Any]) -> ConversationItem:
        """Encode an item."""
        call, output_of = (
            str(fields.get("call_id")) if fields["type"] == kind else "" for kind in (_CALL, f"{_CALL}_output")
        )
        return cls(fields["id"], dumps_decoded(fields), dumps_decoded(_input_item(fields)), call, output_of)

    @classmethod
    def of_response(cls, fields: dict[str, Any]) -> ConversationItem:
        """Encode an item of a response, which may be in progress."""
        readable = ("completed", "incomplete") if fields["type"] == "message" else ("completed",)
        return cls.of(fields)._replace(is_cut=fields["status"] not in readable)

    @property
    def size(self) -> int:
        return len(self.event) + len(self.input)


class RealtimeConversation:
    """The items of a conversation, in order.

    Args:
        hold: returns a share of the memory quota with a number of bytes.

    Attributes:
        items: items by id.
    """

    def __init__(self, hold: Callable[[int], Share]) -> None:
        self.id = f"conv_{new_digits()}"
        self.items: dict[str, ConversationItem] = {}
        self._hold = hold
        self._memory: dict[str, Share] = {}  # of each item

    @property
    def last_id(self) -> str | None:
        """Return the id of the last item."""
        return next(reversed(self.items), None)

    @property
    def size(self) -> int:
        """Return the total size of the items, in bytes."""
        return sum(item.size for item in self.items.values())

    def calls_before(self, previous: object) -> dict[str, str]:
        """Return the types of the calls before an item that is added after `previous`, by their ids.

        Args:
            previous: as for `add`.
        """
        before = [*self.items.values()][: self._index(previous)]
        return {item.call: _CALL for item in before if item.call}

    def add(self, item: ConversationItem, previous: object = None) -> str | None:
        """Add an item, and return the id of the item before it.

        Args:
            previous: id of the item before it, "root" for the beginning, or None for the end.

        Raises:
            ServingError: the item cannot be added.
        """
        if item.id in self.items:
            raise EventError(f"item.id={show(item.id)}: an item with this id exists", "invalid_value", "item.id")
        self.check_room()
        index = self._index(previous)
        self._memory[item.id] = self._hold(item.size)
        items = [*self.items.items()]
        items.insert(index, (item.id, item))
        self.items = dict(items)
        return self.id_before(item.id)

    def id_before(self, id: str) -> str | None:
        """Return the id of the item before the one with this id, or None if it is the first."""
        ids = [*self.items]
        index = ids.index(id)
        return ids[index - 1] if index else None

    def _index(self, previous: object) -> int:
        """Return the index of an item that is added after `previous` (see `add`)."""
        if previous is None:
            return len(self.items)
        if previous == "root":
            return 0
        if not isinstance(previous, str) or previous not in self.items:
            raise _no_item(previous, "previous_item_id")
        return [*self.items].index(previous) + 1

    def check_room(self) -> None:
        """Raise EventError if no item can be added."""
        if len(self.items) >= _MAX_ITEMS:
            raise EventError(f"a conversation can have at most {_MAX_ITEMS} items", "conversation_too_long")

    def replace(self, item: ConversationItem) -> None:
        """Replace an item that was in progress, unless it has been removed.

        Raises:
            ServingError: there is not enough memory. The item is removed.
        """
        begun = self.items.get(item.id)
        if begun is None or not begun.is_cut:
            return
        try:
            memory = self._hold(item.size)
        except ServingError:
            self.remove(begun)
            raise
        self.items[item.id], self._memory[item.id] = item, memory

    def remove(self, item: ConversationItem) -> None:
        """Remove an item."""
        del self.items[item.id]
        self._memory.pop(item.id).close()

    def get(self, id: object) -> ConversationItem:
        """Return an item.

        Raises:
            EventError: no item has this id.
        """
        if not isinstance(id, str) or id not in self.items:
            raise _no_item(id, "item_id")
        return self.items[id]


def _no_item(id: object, param: str) -> EventError:
    return EventError(f"{param}={show(id)}: no item of the conversation has this id", "item_not_found", param)


def readable(items: Sequence[ConversationItem]) -> list[ConversationItem]:
    """Return the items without those that are cut and have no output."""
    outputs = {item.output_of for item in items if item.output_of}
    return [item for item in items if not item.is_cut or item.call in outputs]


def check_outputs(items: Sequence[ConversationItem]) -> None:
    """Raise EventError if a call has been deleted, but not its output, which no model can read alone."""
    calls = set[str]()
    for item in items:
        calls.add(item.call)
        if item.output_of and item.output_of not in calls:
            raise EventError(
                f"the item {item.id!r} is the output of a call that is not before it; delete the item",
                "invalid_value",
                "item_id",
            )


def read_item(value: Any, check: Callable[[Mapping[str, Any]], object] = bool) -> ConversationItem:
    """Check an item of the conversation, and set its id and status if they are missing.

    Args:
        check: called with the item as it is in the input of a request for /v1/responses.

    Raises:
        EventError: the item is invalid.
        ServingError: `check` has raised the error.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("message", _CALL, f"{_CALL}_output"):
        message = "item.type: must be message, function_call or function_call_output"
        raise EventError(message, "invalid_value", "item.type")
    id = value.get("id")
    if id is not None and (not isinstance(id, str) or not 0 < len(id) <= 256):
        raise EventError("item.id: must be a string of 1 to 256 characters", "invalid_value", "item.id")
    if kind == "message":
        _check_parts(value)
    item = {**value, "object": "realtime.item", "status": value.get("status") or "completed"}
    check(_input_item(item))
    return ConversationItem.of({**item, "id": id or f"item_{new_digits()}"})


def _check_parts(item: Mapping[str, Any]) -> None:
    role, content = item.get("role"), item.get("content")
    parts = _PARTS.get(role) if isinstance(role, str) else None
    if parts is None:
        raise EventError("item.role: must be user, system or assistant", "invalid_value", "item.role")
    if not isinstance(content, list):
        raise EventError("item.content: must be a list of parts", "invalid_type", "item.content")
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in parts:
            at = f"item.content[{number}].type"
            raise EventError(f"{at}: must be {' or '.join(parts)}", "not_supported", at)


def _input_item(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item as /v1/responses reads it."""
    fields = {name: value for name, value in item.items() if name != "object"}
    if item["type"] == "message" and item["role"] == "assistant":
        fields["content"] = [{"type": "output_text", "text": part.get("text", "")} for part in item["content"]]
    return fields
