"""A response's `instructions` and `input` as the messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from handler.core.errors import InvalidPayload
from handler.protocols.readers.messages import MAX_ARGUMENTS
from handler.protocols.readers.turns import Chat, add_to_turn, join_turns
from handler.protocols.validation import show

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
_READ = {
    "message": {"type", "role", "content", "id", "status", "phase"},
    "function_call": {"type", "id", "call_id", "name", "namespace", "arguments", "status", "caller"},
    "function_call_output": {"type", "id", "call_id", "output", "status", "name", "namespace", "caller"},
    "reasoning": {"type", "id", "summary", "content", "status", "encrypted_content"},
}
"""Type of an item -> its names that are read, or have no effect by what they mean."""


def full_name(namespace: Any, name: str) -> str:
    """Return the name under which the prompt shows a tool."""
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


class InputReader:
    """Reads one request's input.

    Attributes:
        chat: messages in the chat's form, those of one role in a row joined.
        unknown: names without effect, as `input[].NAME`.
    """

    def __init__(self) -> None:
        self.chat: Chat = []
        self.unknown: dict[str, None] = {}
        self._calls: set[str] = set()

    def read(self, body: Mapping[str, Any]) -> None:
        """Read `instructions` and `input`.

        Raises:
            InvalidPayload: naming the wrong item and what would be right; it quotes no content.
        """
        instructions, given = body.get("instructions"), body.get("input")
        if instructions is not None:
            if not isinstance(instructions, str):
                raise InvalidPayload("'instructions' must be a string")
            add_to_turn(self.chat, "system", content=instructions)
        if isinstance(given, str) and given:
            given = [{"role": "user", "content": given}]
        if not isinstance(given, list) or not given:
            raise InvalidPayload("'input' must be a non-empty string or list of items")
        for index, item in enumerate(given):
            self._item(item, f"input[{index}]")
        join_turns(self.chat)

    def _item(self, item: Any, at: str) -> None:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if not isinstance(kind, str):
            raise InvalidPayload(f"{at} must be an object with 'type', or with 'role' and 'content'")
        if kind == "item_reference":
            raise InvalidPayload(
                f"{at}: 'item_reference' is not supported: nothing is kept; send the item, as with store=false"
            )
        if kind not in _READ:
            raise InvalidPayload(f"{at}: {kind[:64]!r} is not supported: it must be {' or '.join(_READ)}")
        self.unknown |= {f"input[].{name}": None for name in item.keys() - _READ[kind] if item[name] is not None}
        if kind == "message":
            if item.get("role") not in _ROLES:
                raise InvalidPayload(f"{at}.role must be one of {', '.join(_ROLES)}")
            role = "system" if item["role"] == "developer" else item["role"]
            add_to_turn(self.chat, role, content=_text(item.get("content"), f"{at}.content"))
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            if parts:
                add_to_turn(self.chat, "assistant", reasoning_content=_text(parts, f"{at}.content"))
        elif kind == "function_call":
            add_to_turn(self.chat, "assistant", tool_calls=self._call(item, at))
        else:
            id = _string(item, "call_id", at)
            if id not in self._calls:
                raise InvalidPayload(f"{at}.call_id={show(id)}: no function_call before it has this id")
            output = _text(item.get("output"), f"{at}.output")
            self.chat.append({"role": "tool", "tool_call_id": id, "content": output})

    def _call(self, item: Mapping[str, Any], at: str) -> dict[str, Any]:
        id, arguments = _string(item, "call_id", at), _string(item, "arguments", at)
        name = full_name(item.get("namespace"), _string(item, "name", at))
        try:
            value = json.loads(arguments or "{}") if len(arguments) <= MAX_ARGUMENTS else None
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise InvalidPayload(f"{at}.arguments must be the JSON text of an object, of {MAX_ARGUMENTS} characters")
        self._calls.add(id)
        return {"id": id, "type": "function", "function": {"name": name, "arguments": value}}


def _text(content: Any, at: str) -> str:
    """Read a string, or parts of text, which line ends join."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidPayload(f"{at} must be a string or a non-empty list of parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in _TEXTS:
            raise InvalidPayload(f"{at}[{index}]: {show(kind)} is not supported: the engine reads text only")
        if not isinstance(text, str):
            raise InvalidPayload(f"{at}[{index}].text must be a string")
        texts.append(text)
    return "\n".join(texts)


def _string(value: Mapping[str, Any], name: str, at: str) -> str:
    if not isinstance(found := value.get(name), str):
        raise InvalidPayload(f"{at}.{name} must be a string")
    return found
