"""Readers of a chat's `messages`, which several dialects share: roles, text, media, tool calls and their results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from handler.core.errors import InvalidPayload
from handler.core.media import MediaSource
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.readers.media import (
    check_number,
    check_read,
    check_taken,
    only_in,
    place,
    read_base64,
    read_url,
)
from handler.protocols.kernel.schema.shapes import COUNT, NULL, TEXT, Shape, listing, nullable, record

ROLES = ("system", "user", "assistant", "developer", "tool")

MAX_ARGUMENTS, MAX_ALL_ARGUMENTS = 1 << 20, 1 << 22

_URLS = {"image_url": "image", "audio_url": "audio"}
"""Types of parts with a URL in a field of the same name, and the kind of their media."""

_AUDIO = "input_audio"
"""OpenAI's type of parts with an audio clip."""

AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg", "opus")
"""Formats of audio clips; OpenAI has the first two. The file itself says which one it is."""

_KINDS = {**_URLS, _AUDIO: "audio"}
"""Types of parts with media, and their kinds."""

_OTHER_IMAGES = ("image", "input_image")
"""What other APIs call a part with an image."""

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

_PART = record(
    {"type": {"enum": ["text", *_KINDS]}},
    {
        "text": nullable(TEXT),
        **{name: {"anyOf": [TEXT, record({"url": TEXT}), NULL]} for name in _URLS},
        _AUDIO: nullable(record({"data": TEXT}, {"format": nullable({"enum": [*AUDIO_FORMATS]})})),
    },
)
MESSAGES: Shape = listing(
    record(
        {"role": {"enum": [*ROLES]}},
        {
            "content": {"anyOf": [TEXT, listing(_PART, minItems=1), NULL]},
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
    for index, message in enumerate(value):
        at = f"messages[{index}]"
        if not isinstance(message, dict):
            raise InvalidPayload(f"{at} must be an object with 'role' and 'content'")
        message = {name: item for name, item in message.items() if item is not None}
        read_message = _message(message, at, context, unknown)
        if read_message["role"] == "user":
            read_message["content"] = _content(message.get("content"), f"{at}.content", context, media, unknown)
        messages.append(read_message)
        read = ("role", "content", *_READ.get(read_message["role"], ()))
        unknown |= {f"messages[].{name}": None for name in message if name not in read}
    if media:
        check_number(media, context)
    return tuple(messages), media, list(unknown)


def _message(message: Message, at: str, context: ServerContext, unknown: dict[str, None]) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise InvalidPayload(f"{at}.role must be one of {', '.join(ROLES)}")
    if role == "assistant":
        if "audio" in message:
            raise InvalidPayload(f"{at}.audio is not supported: no answers are kept; send its transcript as content")
        calls, thoughts = message.get("tool_calls"), _thoughts(message, at)
        read = {"role": role, "content": ""}
        if content is not None or not (calls or thoughts):
            read["content"] = _text(content, f"{at}.content", context)
        return {
            **read,
            **thoughts,
            **({"tool_calls": _tool_calls(calls, f"{at}.tool_calls", unknown)} if calls else {}),
        }
    if role == "user":
        return {"role": role}
    result = {"role": "system" if role == "developer" else role, "content": _text(content, f"{at}.content", context)}
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


def _text(content: Any, at: str, context: ServerContext) -> str:
    """Read a string, or text parts, which LMI and vLLM join with line ends."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidPayload(f"{at} must be a string or a non-empty list of parts")
    return "\n".join([_part(part, f"{at}[{index}]", context) for index, part in enumerate(content)])


def _content(
    content: Any, at: str, context: ServerContext, media: list[MediaSource], unknown: dict[str, None]
) -> str | list[Message]:
    """Read a text as `_text` does; with media a list of parts, each a text or a medium's place.

    Args:
        media: gets those of the content.
        unknown: gets names that have no effect.
    """
    if not isinstance(content, list) or not any(_is_medium(part) for part in content):
        return _text(content, at, context)
    parts: list[Message] = []
    for index, part in enumerate(content):
        where = f"{at}[{index}]"
        if isinstance(part, MediaSource):
            source = part
        elif (word := _type(part)) in _KINDS:
            check_taken(_KINDS[word], word, where, context)
            source = _medium(part, word, where, unknown)
        else:
            parts.append({"type": "text", "text": _part(part, where, context)})
            continue
        media.append(source)
        parts.append(place(source))
    return parts


def _is_medium(part: Any) -> bool:
    return isinstance(part, MediaSource) or _type(part) in _KINDS


def _type(part: Any) -> str:
    """Return the type of a part; "" where it has none."""
    word = part.get("type") if isinstance(part, dict) else None
    return word if isinstance(word, str) else ""


def _medium(part: Message, word: str, at: str, unknown: dict[str, None]) -> MediaSource:
    """Read OpenAI's part of type `word`; the field of a URL may also be the URL itself, as in vLLM."""
    given = part.get(word)
    read = ("data", "format") if word == _AUDIO else ("url",)
    more = {name: value for name, value in given.items() if name not in read} if isinstance(given, dict) else {}
    if more.get("detail") == "auto":
        del more["detail"]  # as if it was left out
    unknown |= {f"messages[].content[].{word}.{name}": None for name, value in more.items() if value is not None}
    names = [name for name in part if name not in ("type", word) and part[name] is not None]
    unknown |= {f"messages[].content[].{name}": None for name in names}
    if word == _AUDIO:
        return _input_audio(given, f"{at}.{word}")
    return read_url(_URLS[word], given.get("url") if isinstance(given, dict) else given, f"{at}.{word}")


def _input_audio(given: Any, at: str) -> MediaSource:
    if not isinstance(given, dict):
        raise InvalidPayload(f"{at} must be an object with 'data', the file in base64, and 'format'")
    if (name := given.get("format")) is not None and name not in AUDIO_FORMATS:
        raise InvalidPayload(f"{at}.format must be one of {', '.join(AUDIO_FORMATS)}")
    return read_base64("audio", given.get("data"), f"{at}.data")


def _part(part: Any, at: str, context: ServerContext) -> str:
    word = _type(part)
    if word in _KINDS:
        raise InvalidPayload(f"{at}: {word!r} is not supported: {only_in(_KINDS[word])}")
    if word in _OTHER_IMAGES:
        check_taken("image", word, at, context)
        raise InvalidPayload(f"{at}: {word!r} is not supported: write it as an 'image_url'")
    check_read(word, at, context)
    if word != "text" or not isinstance(part.get("text"), str):
        raise InvalidPayload(f"{at} must be an object with 'type': 'text' and a string 'text'")
    return str(part["text"])
