"""Anthropic's `system` and `messages` as those of a chat: blocks become text, images, thoughts, calls, results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.core.errors import InvalidPayload
from handler.core.media import MediaSource
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.readers.media import check_taken, only_in, read_base64, read_url
from handler.protocols.kernel.readers.turns import Chat, add_to_turn, join_turns
from handler.protocols.kernel.schema.shapes import TEXT, Shape, listing, nullable, record
from handler.protocols.kernel.validation import show

_ROLES = ("user", "assistant", "system")

_BLOCKS: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""Role -> the types of its blocks."""

_FIELDS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"type", "text", "cache_control"}),
    "image": frozenset({"type", "source", "cache_control"}),
    "thinking": frozenset({"type", "thinking", "signature"}),
    "redacted_thinking": frozenset({"type", "data"}),
    "tool_use": frozenset({"type", "id", "name", "input", "cache_control", "caller"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "cache_control"}),
}
"""Type of a block -> its names that are read, or have no effect by what they mean."""

_WHY: Mapping[str, str] = {
    "image": only_in("image"),
    "document": "send its text in a block of type 'text'",
    "search_result": "send its text in a block of type 'text'",
    "container_upload": "there are no containers",
    "tool_reference": "there is no search among tools",
}


_BLOCK = record({"type": {"enum": [*_FIELDS]}})
_CONTENT: Shape = {"anyOf": [TEXT, listing(_BLOCK, minItems=1)]}
MESSAGES: Mapping[str, Shape] = {
    "messages": listing(record({"role": {"enum": [*_ROLES]}, "content": _CONTENT}), minItems=1),
    "system": nullable(_CONTENT),
}
"""What `MessagesReader` reads."""


class MessagesReader:
    """Reads one request's messages.

    Images in a call's result follow the results, as a part of the user's own turn: chat templates take a result's text
    only.

    Attributes:
        chat: messages in the chat's form, those of one role in a row joined.
        continues: the answer continues the last message.
        unknown: names without effect, as `messages[].content[].NAME`.
    """

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._shown: list[MediaSource] = []  # by the results of calls
        self.chat: Chat = []
        self.continues = False
        self.unknown: dict[str, None] = {}
        self._calls: dict[str, str] = {}  # id -> the tool's name

    def read(self, body: Mapping[str, Any]) -> None:
        """Read `system`, the messages of the thread before, and `messages`.

        Raises:
            InvalidPayload: naming the wrong block and what would be right; it quotes no content.
        """
        if body.get("system") is not None:
            self._read_content("system", body["system"], "system")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise InvalidPayload("'messages' must be a non-empty list")
        before = self._context.recalled.history
        for index, message in enumerate([*before, *messages], -len(before)):
            at = f"messages[{index}]" if index >= 0 else f"thread: message {index}"
            if not isinstance(message, dict):
                raise InvalidPayload(f"{at} must be an object with 'role' and 'content'")
            if message.get("role") not in _ROLES:
                raise InvalidPayload(f"{at}.role must be one of {', '.join(_ROLES)}")
            self._note("messages[]", message, frozenset({"role", "content"}))
            self._read_content(message["role"], message.get("content"), f"{at}.content")
        join_turns(self.chat)
        self.continues = self.chat[-1]["role"] == "assistant"
        if self.continues and ("tool_calls" in self.chat[-1] or not self.chat[-1]["content"].strip()):
            raise InvalidPayload(f"messages[{index}]: an answer continues its text; it must have some, and no tool_use")

    def clear_thinking(self, kept: int | None) -> None:
        """Remove the thoughts but those of the last messages that have any; `kept` is their number, None for all."""
        thoughts = [message for message in self.chat if "reasoning_content" in message]
        for message in thoughts[: len(thoughts) - kept] if kept is not None and kept < len(thoughts) else ():
            del message["reasoning_content"]

    def _read_content(self, role: str, content: Any, at: str) -> None:
        if isinstance(content, str):
            return add_to_turn(self.chat, role, content=content)
        if not isinstance(content, list) or not content:
            raise InvalidPayload(f"{at} must be a string or a non-empty list of blocks")
        for index, block in enumerate(content):
            self._read_block(role, block, f"{at}[{index}]")
        self._add_shown()

    def _read_block(self, role: str, block: Any, at: str) -> None:
        kind = block_type(block, at, _BLOCKS[role])
        self._note("system[]" if at.startswith("system") else "messages[].content[]", block, _FIELDS[kind])
        if kind != "tool_result":
            self._add_shown()
        if kind == "text":
            add_to_turn(self.chat, role, content=_string(block, "text", at))
        elif kind == "image":
            add_to_turn(self.chat, role, content=self._read_image(block, at))
        elif kind == "thinking":
            add_to_turn(self.chat, role, reasoning_content=_string(block, "thinking", at))
        elif kind == "redacted_thinking":  # only Anthropic can read it
            add_to_turn(self.chat, role)
            self.unknown["messages[].content[].redacted_thinking"] = None
        elif kind == "tool_use":
            add_to_turn(self.chat, role, tool_calls=self._read_call(block, at))
        else:
            self.chat.append(self._read_result(block, at))

    def _add_shown(self) -> None:
        for image in self._shown:
            add_to_turn(self.chat, "user", content=image)
        self._shown.clear()

    def _read_image(self, block: Mapping[str, Any], at: str) -> MediaSource:
        check_taken("image", "image", at, self._context)
        given, name = block.get("source"), f"{at}.source"
        source = given if isinstance(given, dict) else {}
        match source.get("type"):
            case "base64":
                return read_base64("image", source.get("data"), f"{name}.data")
            case "url":
                return read_url("image", source.get("url"), f"{name}.url")
            case "file":
                raise InvalidPayload(f"{name}: 'file' is not supported: no files are kept; send base64 or url")
        raise InvalidPayload(f"{name} must be an object with a 'type' that is base64 or url")

    def _read_call(self, block: Mapping[str, Any], at: str) -> dict[str, Any]:
        id, name = _string(block, "id", at), _string(block, "name", at)
        if not isinstance(block.get("input"), dict):
            raise InvalidPayload(f"{at}.input must be an object")
        self._calls[id] = name
        return {"id": id, "type": "function", "function": {"name": name, "arguments": block["input"]}}

    def _read_result(self, block: Mapping[str, Any], at: str) -> dict[str, Any]:
        id, content = _string(block, "tool_use_id", at), block.get("content")
        if id not in self._calls:
            raise InvalidPayload(f"{at}.tool_use_id={show(id)}: no tool_use before it has this id")
        if isinstance(content, list):
            texts = []
            for index, part in enumerate(content):
                where = f"{at}.content[{index}]"
                kind = block_type(part, where, ("text", "image"))
                self._note("messages[].content[].content[]", part, _FIELDS[kind])
                if kind == "image":
                    self._shown.append(self._read_image(part, where))
                else:
                    texts.append(_string(part, "text", where))
            content = "\n".join(texts)
        if not isinstance(content, str | None):
            raise InvalidPayload(f"{at}.content must be a string or a list of blocks")
        return {"role": "tool", "tool_call_id": id, "name": self._calls[id], "content": content or ""}

    def _note(self, at: str, value: Mapping[str, Any], known: frozenset[str]) -> None:
        neutral: tuple[Any, ...] = (None, False, [])  # is_error: false, citations: []
        self.unknown |= {f"{at}.{name}": None for name in value if name not in known and value[name] not in neutral}


def block_type(block: Any, at: str, known: tuple[str, ...]) -> str:
    """Return a block's type.

    Raises:
        InvalidPayload: it is none of `known`.
    """
    kind = block.get("type") if isinstance(block, dict) else None
    allowed = " or ".join(filter(None, (", ".join(known[:-1]), known[-1])))
    if not isinstance(kind, str):
        raise InvalidPayload(f"{at} must be an object with a 'type' that is {allowed}")
    if kind not in known:
        server = kind.startswith("server_tool_use") or kind.endswith("_tool_result")
        why = _WHY.get(kind, "server tools run at Anthropic" if server else f"it must be {allowed}")
        raise InvalidPayload(f"{at}: {kind[:64]!r} is not supported: {why}")
    return kind


def _string(value: Mapping[str, Any], name: str, at: str) -> str:
    if not isinstance(found := value.get(name), str):
        raise InvalidPayload(f"{at}.{name} must be a string")
    return found
