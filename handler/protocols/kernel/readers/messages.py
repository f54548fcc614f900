"""Readers of a chat's `messages`, which several dialects share: roles, text, media, tool calls and their results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from handler.core.errors import InvalidPayload
from handler.core.media import MediaSource
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.readers.media import check_number, place
from handler.protocols.kernel.readers.parts import PARTS, PartReader
from handler.protocols.kernel.schema.shapes import COUNT, NULL, TEXT, Shape, listing, nullable, record

ROLES = ("system", "user", "assistant", "developer", "tool")

MAX_ARGUMENTS, MAX_ALL_ARGUMENTS = 1 << 20, 1 << 22

_THOUGHTS = ("reasoning", "reasoning_content")

_CALL = record(
    {"function": record({"name": TEXT}, {"arguments": {"type": ["string", "object"]}})},
    {"id": nullable(TEXT), "type": TEXT, "index": COUNT},
)
_READ: Mapping[str, Mapping[str, Shape]] = {
    "tool": {"tool_call_id": nullable(TEXT), "name": nullable(TEXT)},
    "assistant": {"tool_calls": nullable(listing(_CALL)), **dict.fromkeys(_THOUGHTS, nullable(TEXT))},
}
"""Fields of a message beside role and content."""

MESSAGES: Shape = listing(
    record(
        {"role": {"enum": [*ROLES]}},
        {
            "content": {"anyOf": [TEXT, PARTS, NULL]},
            **{name: shape for fields in _READ.values() for name, shape in fields.items()},
        },
    ),
    minItems=1,
)
"""What `read_messages` reads."""

Message = Mapping[str, Any]


def read_messages(value: Any, context: ServerContext) -> tuple[tuple[Message, ...], list[MediaSource], list[str]]:
    """Read the messages as the tokenizer takes them and the media in them, and list their unknown names.

    `developer` means `system`, null means absent. A dialect that is translated to this one puts a MediaSource itself
    in the place of a part.

    Raises:
        InvalidPayload: naming the wrong message and what would be right; it quotes no content.
    """
    if not isinstance(value, list) or not value:
        raise InvalidPayload("'messages' must be a non-empty list")
    _check_arguments(value)
    messages, media, unknown = [], list[MediaSource](), dict[str, None]()
    parts = PartReader(context, "messages[].content[]", unknown)
    for index, message in enumerate(value):
        at = f"messages[{index}]"
        if not isinstance(message, dict):
            raise InvalidPayload(f"{at} must be an object with 'role' and 'content'")
        message = {name: item for name, item in message.items() if item is not None}
        read_message = _message(message, at, parts, media)
        messages.append(read_message)
        read = ("role", "content", *_READ.get(read_message["role"], ()))
        unknown |= {f"messages[].{name}": None for name in message if name not in read}
    if media:
        check_number(media, context)
    return tuple(messages), media, list(unknown)


def _message(message: Message, at: str, parts: PartReader, media: list[MediaSource]) -> dict[str, Any]:
    """Read a message; `media` gets those of its content."""
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise InvalidPayload(f"{at}.role must be one of {', '.join(ROLES)}")
    if role == "assistant":
        if "audio" in message:
            raise InvalidPayload(f"{at}.audio is not supported: no answers are kept; send its transcript as content")
        calls, thoughts = message.get("tool_calls"), _thoughts(message, at)
        read = {"role": role, "content": ""}
        if content is not None or not (calls or thoughts):
            read["content"] = _text(content, f"{at}.content", parts)
        return {
            **read,
            **thoughts,
            **({"tool_calls": _tool_calls(calls, f"{at}.tool_calls", parts.unknown)} if calls else {}),
        }
    if role == "user":
        return {"role": role, "content": _content(content, f"{at}.content", parts, media)}
    result = {"role": "system" if role == "developer" else role, "content": _text(content, f"{at}.content", parts)}
    if role == "tool":
        result |= {name: _string(message[name], f"{at}.{name}") for name in _READ["tool"] if name in message}
    return result


def _thoughts(message: Message, at: str) -> dict[str, str]:
    """Read an assistant's thoughts, and give them all names under which chat templates read them."""
    for name in _THOUGHTS:
        if name in message:
            return dict.fromkeys((*_THOUGHTS, "thinking"), _string(message[name], f"{at}.{name}"))
    return {}


def _check_arguments(messages: list[Any]) -> None:
    """Bound the JSON texts in calls: other requests wait while they are parsed."""
    calls = [call for message in messages for call in _list(message, "tool_calls")]
    if not calls:
        return
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    texts = [function.get("arguments") for function in functions if isinstance(function, dict)]
    sizes = [len(text) for text in texts if isinstance(text, str)]
    if max(sizes, default=0) > MAX_ARGUMENTS or sum(sizes) > MAX_ALL_ARGUMENTS:
        raise InvalidPayload(
            f"messages[].tool_calls: the arguments of a call may have {MAX_ARGUMENTS} characters, those of all "
            f"{MAX_ALL_ARGUMENTS}"
        )


def _list(message: Any, name: str) -> list[Any]:
    value = message.get(name) if isinstance(message, dict) else None
    return value if isinstance(value, list) else []


def _tool_calls(value: Any, at: str, unknown: dict[str, None]) -> list[dict[str, Any]]:
    """Read calls as chat templates take them, with arguments as objects."""
    if not isinstance(value, list):
        raise InvalidPayload(f"{at} must be a list")
    return [_tool_call(call, f"{at}[{index}]", unknown) for index, call in enumerate(value)]


def _tool_call(call: Any, at: str, unknown: dict[str, None]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidPayload(f"{at} must be an object with 'function', which has 'name' and 'arguments'")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = read_arguments(arguments, "messages[].tool_calls[].function.arguments", unknown)
    if not isinstance(arguments, dict):
        raise InvalidPayload(f"{at}.function.arguments must be the JSON text of an object")
    id = {} if call.get("id") is None else {"id": _string(call["id"], f"{at}.id")}
    return {**id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def read_arguments(text: str, name: str, unknown: dict[str, None]) -> dict[str, Any]:
    """Read the JSON text of a call's arguments.

    What a model wrote wrongly stands in the history from then on: it is left out, and its `name` is listed.
    """
    try:
        value = json.loads(text or "{}")
        if "\\u" in text:  # only an escape can bring half a surrogate pair in
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    unknown[name] = None
    return {}


def _string(value: Any, at: str) -> str:
    if not isinstance(value, str):
        raise InvalidPayload(f"{at} must be a string")
    return value


def _text(content: Any, at: str, parts: PartReader) -> str:
    """Read a string, or text parts, which LMI and vLLM join with line ends."""
    return "\n".join([part for part in parts.read(content, at, media=False) if isinstance(part, str)])


def _content(content: Any, at: str, parts: PartReader, media: list[MediaSource]) -> str | list[Message]:
    """Read a text as `_text` does; with media a list of parts, each a text or a medium's place.

    Args:
        media: gets those of the content.
    """
    read = parts.read(content, at, media=True)
    found = [part for part in read if isinstance(part, MediaSource)]
    if not found:
        return "\n".join([part for part in read if isinstance(part, str)])
    media += found
    return [place(part) if isinstance(part, MediaSource) else {"type": "text", "text": part} for part in read]
