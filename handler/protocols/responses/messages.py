"""A response's `instructions` and `input` as the messages of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from handler.core.errors import InvalidPayload, NotKept
from handler.core.media import MediaSource
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.readers.messages import MAX_ARGUMENTS, read_arguments
from handler.protocols.kernel.readers.parts import PartReader
from handler.protocols.kernel.readers.turns import Chat, add_to_turn, join_turns
from handler.protocols.kernel.schema.shapes import TEXT, Shape, listing, nullable, record
from handler.protocols.kernel.validation import show
from handler.protocols.responses.items import secret_id

_ROLES = ("user", "assistant", "system", "developer")
_READ = {
    "message": {"type", "role", "content", "id", "status", "phase"},
    "function_call": {"type", "id", "call_id", "name", "namespace", "arguments", "status", "caller"},
    "function_call_output": {"type", "id", "call_id", "output", "status", "name", "namespace", "caller"},
    "reasoning": {"type", "id", "summary", "content", "status", "encrypted_content"},
}
"""Type of an item -> its names that are read, or have no effect by what they mean."""

_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
"""Type of an item -> how its id begins."""

INPUT: Mapping[str, Shape] = {
    "input": {
        "anyOf": [
            {**TEXT, "minLength": 1},
            listing(record({}, {"type": {"enum": [*_READ, None]}}), minItems=1),
        ]
    },
    "instructions": nullable(TEXT),
}
"""What `InputReader` reads."""


def full_name(namespace: Any, name: str) -> str:
    """Return the name under which the prompt shows a tool."""
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


class InputReader:
    """Reads one request's input.

    Images in a call's output follow the outputs, as a part of the user's own turn: chat templates take an output's text
    only.

    Attributes:
        chat: messages in the chat's form, those of one role in a row joined.
        unknown: names without effect, as `input[].NAME`.
        items: those of `input`, with others in the place of references.
    """

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._shown: list[MediaSource] = []  # by the outputs of calls
        self.chat: Chat = []
        self.unknown: dict[str, None] = {}
        self._parts = PartReader(context, "input[].content[]", self.unknown)
        self.items: list[Any] = []
        self._calls: set[str] = set()

    def read(self, body: Mapping[str, Any]) -> None:
        """Read `instructions`, the items of the responses before, and `input`.

        Raises:
            InvalidPayload: naming the wrong item and what would be right; it quotes no content.
        """
        instructions, given = body.get("instructions"), body.get("input")
        if instructions is not None:
            if not isinstance(instructions, str):
                raise InvalidPayload("'instructions' must be a string")
            add_to_turn(self.chat, "system", content=instructions)
        if isinstance(given, str) and given:
            given = [{"type": "message", "role": "user", "content": given}]
        if not isinstance(given, list) or not given:
            raise InvalidPayload("'input' must be a non-empty string or list of items")
        for index, item in enumerate(self._context.recalled.history):
            if not _is_half_a_call(item):
                self._item(item, f"previous_response_id: item {index}")
        for index, item in enumerate(given):
            self._item(self._resolved(item, f"input[{index}]"), f"input[{index}]")
        self._add_shown()
        if not self.chat:
            raise InvalidPayload("'input' has nothing that the model reads")
        join_turns(self.chat)

    def _resolved(self, item: Any, at: str) -> Any:
        """Return the item that a reference names; any other as it is.

        Raises:
            NotKept: there is none.
        """
        if self._context.keeper is not None and (id := referenced(item)) is not None:
            item = self._context.recalled.items.get(id)
            if item is None:
                why = (
                    "no item of this id is stored: it has expired, was deleted, or came with store=false; send the item"
                )
                raise NotKept(f"{at}.id={show(id)}: {why}", "input")
        self.items.append(item)
        return item

    def _item(self, item: Any, at: str) -> None:
        kind = (item.get("type") or _implied_type(item)) if isinstance(item, dict) else None
        if not isinstance(kind, str):
            raise InvalidPayload(f"{at} must be an object with 'type', or with 'role' and 'content'")
        if kind == "item_reference":
            raise InvalidPayload(
                f"{at}: 'item_reference' is not supported: nothing is kept (option.responses_store); send the item, as "
                "with store=false"
            )
        if kind not in _READ:
            raise InvalidPayload(f"{at}: {kind[:64]!r} is not supported: it must be {' or '.join(_READ)}")
        self.unknown |= {f"input[].{name}": None for name in item.keys() - _READ[kind] if item[name] is not None}
        if kind == "function_call_output":
            return self._output(item, at)
        self._add_shown()
        if kind == "message":
            self._message(item, at)
        elif kind == "reasoning":
            self._reasoning(item, at)
        else:
            add_to_turn(self.chat, "assistant", tool_calls=self._call(item, at))

    def _message(self, item: Mapping[str, Any], at: str) -> None:
        if (role := item.get("role")) not in _ROLES:
            raise InvalidPayload(f"{at}.role must be one of {', '.join(_ROLES)}")
        content, place = item.get("content"), f"{at}.content"
        for part in self._parts.read(content, place, media=True) if role == "user" else [self._text(content, place)]:
            add_to_turn(self.chat, "system" if role == "developer" else role, content=part)

    def _reasoning(self, item: Mapping[str, Any], at: str) -> None:
        parts = item.get("content") or item.get("summary") or []
        if not parts and item.get("encrypted_content"):  # only OpenAI can read it
            self.unknown["input[].encrypted_content"] = None
        if parts:
            add_to_turn(self.chat, "assistant", reasoning_content=self._text(parts, f"{at}.content"))

    def _output(self, item: Mapping[str, Any], at: str) -> None:
        """Read the output of a call. Its images wait for the outputs beside it."""
        id = _string(item, "call_id", at)
        if id not in self._calls:
            raise InvalidPayload(f"{at}.call_id={show(id)}: no function_call before it has this id")
        parts = self._parts.read(item.get("output"), f"{at}.output", media=True)
        output = "\n".join([part for part in parts if isinstance(part, str)])
        self._shown += [part for part in parts if isinstance(part, MediaSource)]
        self.chat.append({"role": "tool", "tool_call_id": id, "content": output})

    def _add_shown(self) -> None:
        for image in self._shown:
            add_to_turn(self.chat, "user", content=image)
        self._shown.clear()

    def _text(self, content: Any, at: str) -> str:
        """Read a string, or parts of text, which line ends join."""
        return "\n".join([part for part in self._parts.read(content, at, media=False) if isinstance(part, str)])

    def _call(self, item: Mapping[str, Any], at: str) -> dict[str, Any]:
        id, arguments = _string(item, "call_id", at), _string(item, "arguments", at)
        name = full_name(item.get("namespace"), _string(item, "name", at))
        if len(arguments) > MAX_ARGUMENTS:
            raise InvalidPayload(f"{at}.arguments has {len(arguments)} characters; at most {MAX_ARGUMENTS}")
        value = read_arguments(arguments, "input[].arguments", self.unknown)
        self._calls.add(id)
        return {"id": id, "type": "function", "function": {"name": name, "arguments": value}}


def referenced(item: Any) -> str | None:
    """Return the id of the item that a reference names; None where it is no reference."""
    if not isinstance(item, dict) or (item.get("type") or _implied_type(item)) != "item_reference":
        return None
    return item["id"] if isinstance(item.get("id"), str) else None


def with_ids(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return items that were read as they are kept: each with an id, a message's text as a part."""
    return [_with_id(item) for item in items]


def _with_id(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type") or "message"
    id = item.get("id")
    found = {**item, "type": kind, "id": id if isinstance(id, str) and id else secret_id(_PREFIXES[kind])}
    if kind == "message" and isinstance(item["content"], str):
        part = {"type": "output_text", "annotations": []} if item["role"] == "assistant" else {"type": "input_text"}
        found["content"] = [{**part, "text": item["content"]}]
    return found if item.get("status") else {**found, "status": "completed"}


def _is_half_a_call(item: Any) -> bool:
    """Whether an item is a call at which its response broke off: nobody has made it."""
    return bool(item["type"] == "function_call" and item.get("status") == "incomplete")


def _implied_type(item: Mapping[str, Any]) -> str:
    """Return the type of an item that names none: a reference has nothing but an id."""
    return "item_reference" if "id" in item and item.keys() <= {"id", "type"} else "message"


def _string(value: Mapping[str, Any], name: str, at: str) -> str:
    if not isinstance(found := value.get(name), str):
        raise InvalidPayload(f"{at}.{name} must be a string")
    return found
