"""Readers of the `messages` of a chat, shared by several dialects: roles, text, media, tool calls and tool results."""

from __future__ import annotations

import base64
import binascii
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.errors import InvalidPayload
from handler.core.media import MEDIA, MediaSource
from handler.protocols.kernel.context import DEFAULT_MAX_MEDIA, ServerContext
from handler.protocols.kernel.path import Path
from handler.protocols.kernel.readers import unread
from handler.protocols.kernel.schema import COUNT, NULL, TEXT, Shape, listing, nullable, record

_SCHEMES = ("http", "https", "file")
_MAX_URL = 8192  # characters, except for data URLs
_BASE64_STEP = 1 << 18  # characters decoded at once, a multiple of four: other threads may run between two steps

_TEXT_ONLY = "the engine reads text only"


def media_part(source: MediaSource) -> dict[str, Any]:
    """Return the part that represents a medium in a message, as Hugging Face chat templates expect it."""
    return {"type": source.kind}


def only_in(kind: str) -> str:
    return f"{MEDIA[kind]} are allowed only in user messages and tool results"


def taken_media(context: ServerContext) -> list[str]:
    """Return the kinds of media that messages may contain."""
    return [kind for kind in MEDIA if not context.no_media.get(kind, _TEXT_ONLY)]


def check_taken(kind: str, word: str, at: str, context: ServerContext) -> None:
    """Raise InvalidPayload if the engine does not accept media of a kind.

    Args:
        word: the client's name for the kind.
        at: the path of the medium in the body.
    """
    if reason := context.no_media.get(kind, _TEXT_ONLY):
        raise InvalidPayload(f"{at}: {word!r} is not supported: {reason}")


def read_url(kind: str, url: Any, name: str) -> MediaSource:
    """Read the URL of a medium.

    Args:
        name: the path of the field, for error messages.

    Raises:
        InvalidPayload: the value is not a URL, or is an invalid data URL.
    """
    if not isinstance(url, str) or not url:
        raise InvalidPayload(f"{name} must be a URL")
    scheme, _, address = url[:_MAX_URL].partition(":")
    if scheme.lower() == "data":
        head, comma, _ = address.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise InvalidPayload(f"{name}: a data URL must be data:{kind}/...;base64,...")
        return read_base64(kind, url, name, start=len(scheme) + len(head) + 2)
    if scheme.lower() not in _SCHEMES:
        raise InvalidPayload(f"{name} must be an http, https, file or data URL")
    if len(url) > _MAX_URL:
        raise InvalidPayload(f"{name} has {len(url)} characters; a URL may have at most {_MAX_URL}")
    return MediaSource(kind, None, url, name)


def read_base64(kind: str, text: Any, name: str, *, start: int = 0) -> MediaSource:
    """Decode a media file from base64.

    Args:
        name: the path of the field, for error messages.
        start: the index of the first character to decode.

    Raises:
        InvalidPayload: the value is not base64, or the file is empty.
    """
    if not isinstance(text, str):
        raise InvalidPayload(f"{name} must be a string")
    try:
        if "=" in text[start:-2]:
            raise ValueError
        parts = range(start, len(text), _BASE64_STEP)
        data = b"".join([base64.b64decode(text[at : at + _BASE64_STEP], validate=True) for at in parts])
    except (binascii.Error, ValueError):
        raise InvalidPayload(f"{name}: the {kind} is not base64") from None
    if not data:
        raise InvalidPayload(f"{name}: the {kind} is empty")
    return MediaSource(kind, data, "", name)


def check_number(media: Sequence[MediaSource], context: ServerContext) -> None:
    """Raise InvalidPayload if a request has too many media of a kind. The message names the first excess medium."""
    if not media:
        return
    for kind, several in MEDIA.items():
        most = context.max_media.get(kind, DEFAULT_MAX_MEDIA)
        if more := [source.name for source in media if source.kind == kind][most:]:
            raise InvalidPayload(f"{more[0]}: a request may have at most {most} {several} (option.limit_mm_per_prompt)")


# -- readers of content parts: texts and media in OpenAI's chats and Responses, and in vLLM's chats --------------------


_TEXTS = {
    "text": "text", "refusal": "refusal", "input_text": "text", "output_text": "text", "thinking": "thinking",
    "reasoning_text": "text", "summary_text": "text", "tool_reference": "name",
}  # fmt: skip
"""Maps the type of a part to the field that contains its text. vLLM accepts the first five types (chat_utils.py), and
`tool_reference`, the result of a search for tools.
"""

_PERHAPS_NULL = ("text", "refusal")
"""Types of parts that are ignored if their text is null, as in vLLM."""

_URLS = {"image_url": "image", "audio_url": "audio"}
"""Maps the type of a part to its kind of media. The URL is in the field that has the name of the type."""

_IMAGE, _AUDIO = "input_image", "input_audio"
"""The type of an image part in the Responses API, and of an audio part in OpenAI chats."""

_KINDS = {**_URLS, _IMAGE: "image", _AUDIO: "audio"}
"""Maps the type of a part to its kind of media."""

_UNREAD = frozenset({"video_url", "input_video", "file", "input_file"})
"""Types of parts that only other servers support."""

_NO_MEDIA = {
    "image": "send the image as an 'image_url'",
    "image_pil": "send the image as an 'image_url'",
    "image_embeds": "send the image itself, as an 'image_url'",
    "audio_embeds": "send the audio itself, as an 'input_audio'",
    "prompt_embeds": "send the text itself",
    "computer_screenshot": "send the image itself, as an 'input_image'",
}
"""Maps an unsupported part type to the reason, or to advice on what to send instead."""

PARTS: Shape = listing(
    {
        "anyOf": [
            TEXT,
            record(
                {"type": {"enum": [*_TEXTS, *_KINDS]}},
                {
                    **dict.fromkeys(_TEXTS.values(), nullable(TEXT)),
                    **{name: {"anyOf": [TEXT, record({"url": TEXT}), NULL]} for name in _URLS},
                    _AUDIO: nullable(record({"data": TEXT}, {"format": nullable(TEXT)})),
                },
            ),
        ]
    },
    minItems=1,
)


class PartReader(NamedTuple):
    """Reads the content parts in a request.

    Attributes:
        path: the path of parts without indices, such as `messages[].content[]`.
        unknown: collects the paths of names that have no effect.
    """

    context: ServerContext
    path: str
    unknown: dict[str, None]

    def read(self, content: Any, at: str | Path, *, media: bool) -> list[str | MediaSource]:
        """Read the content of a message, which is a string or a list of parts.

        Null has no parts, as in vLLM. Content without parts is read as the empty string.

        Args:
            at: the path of the content.
            media: whether the parts may be media.

        Raises:
            InvalidPayload: a part is invalid. The message names its path, its type and a valid form, but quotes no
                content.
        """
        if isinstance(content, str):
            return [content]
        if content is None:
            return []
        if not isinstance(content, list):
            raise InvalidPayload(f"{at} must be a string or a list of parts")
        parts: list[str | MediaSource] = []
        for index, part in enumerate(content):
            text = self._text(part)
            read = self._part(part, f"{at}[{index}]", media=media) if text is None else text
            if read is not None:
                parts.append(read)
        return parts

    def _text(self, part: Any) -> str | None:
        """Return the text of a part, or None if `_part` must read it."""
        if isinstance(part, str):
            return part
        word: Any = part.get("type") if isinstance(part, dict) else None
        text = part.get(_TEXTS[word]) if isinstance(word, str) and word in _TEXTS else None
        if not isinstance(text, str):
            return None
        if len(part) > 2:
            self._report(part, word)
        return text

    def _report(self, part: Mapping[str, Any], word: str) -> None:
        closed = ("closed",) if word == "thinking" else ()  # Mistral's mark of complete reasoning, as any is here
        self.unknown.update(unread(part, self.path, ("type", _TEXTS[word], *closed)))

    def _part(self, part: Any, at: str, *, media: bool) -> str | MediaSource | None:
        word = _type(part)
        if not isinstance(word, str):
            raise InvalidPayload(f"{at} must be a string, or an object with a 'type', such as 'text'")
        if (kind := _KINDS.get(word)) is not None:
            check_taken(kind, word, at, self.context)
            if not media:
                raise InvalidPayload(f"{at}: {word!r} is not supported: {only_in(kind)}")
            return self._medium(part, word, at)
        if word not in _TEXTS:
            raise InvalidPayload(f"{at}: {word[:64]!r} is not supported: {self._reason(word)}")
        self._report(part, word)
        if part.get(field := _TEXTS[word]) is None and word in _PERHAPS_NULL:
            self.unknown[f"{self.path}.{field}"] = None
            return None
        raise InvalidPayload(f"{at}: {word!r} must have a string '{field}'")

    def _reason(self, word: str) -> str:
        """Return the reason why a part type is not supported, or advice on what to send instead."""
        if word in _UNREAD:
            taken = ["text", *(MEDIA[kind] for kind in taken_media(self.context))]
            read = " and ".join(filter(None, (", ".join(taken[:-1]), taken[-1])))
            return f"the engine reads only {read}"
        return _NO_MEDIA.get(word, f"the type must be one of {', '.join((*_TEXTS, *_KINDS))}")

    def _medium(self, part: Mapping[str, Any], word: str, at: str) -> MediaSource:
        """Read a media part. Its URL may be in an object or be the value of the field itself, as in vLLM."""
        field = "image_url" if word == _IMAGE else word
        if part.get("file_id") is not None:
            raise InvalidPayload(f"{at}.file_id is not supported: files are not stored; send {field}")
        value, read = part.get(field), ("data", "format") if word == _AUDIO else ("url",)
        self.unknown.update(unread(part, self.path, ("type", field)) | unread(value, f"{self.path}.{field}", read))
        if word == _AUDIO:
            if not isinstance(value, dict):
                raise InvalidPayload(f"{at}.{word} must be an object with 'data' (the file in base64) and 'format'")
            if value.get("format") is not None:  # any subtype of audio, as in vLLM: the file itself tells its format
                string_at(value["format"], f"{at}.{word}.format")
            return read_base64("audio", value.get("data"), f"{at}.{word}.data")
        return read_url(_KINDS[word], value.get("url") if isinstance(value, dict) else value, f"{at}.{field}")


def _type(part: Any) -> Any:
    """Return the type of a part. If it is missing, a field such as `image_url` implies the type, as in vLLM."""
    if not isinstance(part, dict):
        return None
    return part["type"] if part.get("type") is not None else next((word for word in _KINDS if word in part), None)


ROLES = ("system", "user", "assistant", "developer", "tool")

_WORD = r"""(?:'[^']*'|"[^"]*")"""
_COMPARED = re.compile(
    rf"""\brole\b['"]?[\])]?\s*(?:==|!=|\bin\b|\.(startswith))\s*[\[(]?\s*({_WORD}(?:\s*,\s*{_WORD})*)"""
)
"""Matches a comparison with the message role in a chat template."""


@functools.lru_cache(16)
def _template_roles(template: str) -> tuple[str, ...]:
    """Return the roles that a chat template knows in addition to `ROLES`. A role that ends with "…" is a prefix."""
    roles = [(word[1:-1], prefix) for prefix, words in _COMPARED.findall(template) for word in re.findall(_WORD, words)]
    return tuple(sorted({f"{word}…" if prefix else word for word, prefix in roles if word} - {*ROLES}))


def check_role(role: Any, at: str | Path, roles: Sequence[str], context: ServerContext) -> str:
    """Check that a role is in `roles` or known to the chat template, and return it.

    Raises:
        InvalidPayload: the role is unknown. The message names the known roles.
    """
    if role in roles:
        return str(role)
    template_roles = _template_roles(context.chat_template)
    if not isinstance(role, str) or not any(
        role.startswith(other[:-1]) if other[-1] == "…" else role == other for other in template_roles
    ):
        raise InvalidPayload(f"{at}.role must be one of {', '.join((*roles, *template_roles))}")
    return role


MAX_ARGUMENTS, MAX_ALL_ARGUMENTS = 1 << 20, 1 << 22

_REASONING_FIELDS = ("reasoning", "reasoning_content")
_ARGUMENTS = ("arguments", "parameters")  # huggingface_hub's type of a call has the second name, which TGI reads too

_CALL = record(
    {"function": record({"name": TEXT}, {name: {"type": ["string", "object", "null"]} for name in _ARGUMENTS})},
    {"id": nullable(TEXT), "type": TEXT, "index": COUNT},
)
_READ: Mapping[str, Mapping[str, Shape]] = {
    "tool": {"tool_call_id": nullable(TEXT)},
    "assistant": {"tool_calls": nullable(listing(_CALL)), **dict.fromkeys(_REASONING_FIELDS, nullable(TEXT))},
}
"""The schemas of message fields other than role, content and name, by role."""

MESSAGES: Shape = listing(
    record(
        {"role": {**TEXT, "description": f"{', '.join(ROLES)}, or another role that the chat template knows"}},
        {
            "content": {"anyOf": [TEXT, PARTS, NULL]},
            "name": nullable(TEXT),
            **{name: shape for fields in _READ.values() for name, shape in fields.items()},
        },
    ),
    minItems=1,
)
"""The schema of the messages that `read_messages` reads."""

Message = Mapping[str, Any]


class ChatMessages(NamedTuple):
    """The messages of a chat as its template expects them, their media, and the paths of unknown fields."""

    messages: tuple[Message, ...]
    media: Sequence[MediaSource] = ()
    unknown: Sequence[str] = ()


def read_messages(value: Any, context: ServerContext) -> ChatMessages:
    """Read the `messages` of an OpenAI chat. The role `developer` is read as `system`, and a null field as absent.

    Media in the results of tool calls are moved to the next user message, because chat templates accept only text in
    results.

    Raises:
        InvalidPayload: a message is invalid. The error states the path and a valid form, but quotes no content.
    """
    if not isinstance(value, list) or not value:
        raise InvalidPayload("'messages' must be a non-empty list")
    _check_arguments(value)
    media, unknown = list[MediaSource](), dict[str, None]()
    parts = PartReader(context, "messages[].content[]", unknown)
    messages = [_read_message(message, f"messages[{index}]", parts, media) for index, message in enumerate(value)]
    check_number(media, context)
    return ChatMessages(tuple(_with_text_results(messages) if media else messages), media, list(unknown))


def _read_message(value: Any, at: str, parts: PartReader, media: list[MediaSource]) -> dict[str, Any]:
    """Read a message, append its media to `media`, and add its unknown fields to those of `parts`."""
    if not isinstance(value, dict):
        raise InvalidPayload(f"{at} must be an object with 'role' and 'content'")
    message = _message({name: item for name, item in value.items() if item is not None}, at, parts, media)
    parts.unknown.update(unread(value, "messages[]", ("role", "content", "name", *_READ.get(message["role"], ()))))
    if value.get("name") is not None:
        message["name"] = string_at(value["name"], f"{at}.name")
    return message


def _message(message: Message, at: str, parts: PartReader, media: list[MediaSource]) -> dict[str, Any]:
    role, content = check_role(message.get("role"), at, ROLES, parts.context), message.get("content")
    if role == "assistant":
        if "audio" in message:
            raise InvalidPayload(f"{at}.audio is not supported: audio is not stored; send its transcript as content")
        calls, reasoning = message.get("tool_calls"), _reasoning_fields(message, at)
        return {
            "role": role,
            "content": _text(content, f"{at}.content", parts),
            **reasoning,
            **({"tool_calls": _tool_calls(calls, f"{at}.tool_calls", parts.unknown)} if calls else {}),
        }
    if role in ("user", "tool"):
        joined = _joined(parts.read(content, f"{at}.content", media=True), media)
        texts = {name: string_at(message[name], f"{at}.{name}") for name in _READ.get(role, ()) if name in message}
        return {"role": role, "content": joined, **texts}
    return {"role": "system" if role == "developer" else role, "content": _text(content, f"{at}.content", parts)}


def _with_text_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move the media in the results of tool calls to the next user message, which is added if it is missing."""
    result: list[dict[str, Any]] = []
    media_messages: list[Message] = []  # the media of the results since the last other message
    for message in messages:
        if message["role"] == "tool":
            message, media = _with_text_content(message)
            media_messages += media
        elif media_messages and message["role"] == "user":
            message = {**message, "content": [*media_messages, *_as_parts(message["content"])]}
            media_messages = []
        elif media_messages:
            result.append({"role": "user", "content": media_messages})
            media_messages = []
        result.append(message)
    return [*result, {"role": "user", "content": media_messages}] if media_messages else result


def _with_text_content(message: dict[str, Any]) -> tuple[dict[str, Any], list[Message]]:
    """Return a message whose content is only the text of its parts, and the media among its parts."""
    parts = _as_parts(message["content"])
    text = "\n".join([part["text"] for part in parts if part["type"] == "text"])
    return {**message, "content": text}, [part for part in parts if part["type"] != "text"]


def _as_parts(content: Any) -> list[Message]:
    """Return the content of a message as parts. Empty text has none."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content)


def _reasoning_fields(message: Message, at: str) -> dict[str, str]:
    """Return the reasoning of an assistant under each name that chat templates use for it."""
    texts = [string_at(message[name], f"{at}.{name}") for name in _REASONING_FIELDS if name in message]
    return _reasoning(next(filter(None, texts), "")) if texts else {}


def _reasoning(text: str) -> dict[str, str]:
    return dict.fromkeys((*_REASONING_FIELDS, "thinking"), text)


def _check_arguments(messages: list[Any]) -> None:
    """Raise InvalidPayload if arguments of tool calls are too long. Other requests wait while arguments are parsed."""
    lists = [message["tool_calls"] for message in messages if isinstance(message, dict) and "tool_calls" in message]
    if not lists:
        return
    calls = [call for sent in lists if isinstance(sent, list) for call in sent]
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    texts = [function.get(name) for function in functions if isinstance(function, dict) for name in _ARGUMENTS]
    sizes = [len(text) for text in texts if isinstance(text, str)]
    if max(sizes, default=0) > MAX_ARGUMENTS or sum(sizes) > MAX_ALL_ARGUMENTS:
        raise InvalidPayload(
            f"messages[].tool_calls: the arguments of a call may have at most {MAX_ARGUMENTS} characters, and all "
            f"arguments together at most {MAX_ALL_ARGUMENTS}"
        )


def _tool_calls(value: Any, at: str, unknown: dict[str, None]) -> list[dict[str, Any]]:
    """Return the tool calls as chat templates expect them, with arguments as objects."""
    if not isinstance(value, list):
        raise InvalidPayload(f"{at} must be a list")
    return [_tool_call(call, f"{at}[{index}]", unknown) for index, call in enumerate(value)]


def _tool_call(call: Any, at: str, unknown: dict[str, None]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidPayload(f"{at} must be an object whose 'function' has 'name' and 'arguments'")
    unknown |= unread(call, "messages[].tool_calls[]", _CALL["properties"])
    unknown |= unread(function, "messages[].tool_calls[].function", ("name", *_ARGUMENTS))
    arguments: Any = next((function[name] for name in _ARGUMENTS if function.get(name) not in (None, [])), {})
    if isinstance(arguments, str):
        arguments = read_arguments(arguments, "messages[].tool_calls[].function.arguments", unknown)
    if not isinstance(arguments, dict):
        raise InvalidPayload(f"{at}.function.arguments must be the JSON text of an object")
    id = {} if call.get("id") is None else {"id": string_at(call["id"], f"{at}.id")}
    return {**id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def read_arguments(text: str, name: str, unknown: dict[str, None]) -> dict[str, Any]:
    """Read the JSON arguments of a tool call.

    Invalid text is read as no arguments, because a model may have written it earlier in the chat.

    Args:
        name: the path of the arguments.
        unknown: receives the path if the text is invalid.
    """
    try:
        value = json.loads(text or "{}")
        if "\\u" in text:  # only an escape can be a lone surrogate
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    unknown[name] = None
    return {}


def string_at(value: Any, at: str) -> str:
    """Check that a value is a string, and return it.

    Args:
        at: the path of the value in the body, for error messages.
    """
    if not isinstance(value, str):
        raise InvalidPayload(f"{at} must be a string")
    return value


def _text(content: Any, at: str, parts: PartReader) -> str:
    """Return the text of message content without media. Parts are joined with newlines, as in LMI and vLLM."""
    return "\n".join([part for part in parts.read(content, at, media=False) if isinstance(part, str)])


def _joined(parts: Sequence[str | MediaSource], media: list[MediaSource]) -> str | list[Message]:
    """Return the parts joined with newlines, or a list of them if they contain media, which are added to `media`."""
    sources = [part for part in parts if isinstance(part, MediaSource)]
    if not sources:
        return "\n".join(parts)  # type: ignore[arg-type]  # all are text
    media += sources
    return [media_part(part) if isinstance(part, MediaSource) else {"type": "text", "text": part} for part in parts]


# -- chats whose messages arrive in pieces: consecutive pieces of one role form one message ----------------------------


_JOINED_FIELDS = ("content", "reasoning_content")
_TURN_FIELDS = ("tool_calls", "tool_call_id", "name")

Chat = list[dict[str, Any]]


def add_to_turn(chat: Chat, role: str, **parts: Any) -> None:
    """Add parts to the last message of a chat if it has the same role, or else to a new message.

    `TurnsReader` joins the parts of each message later. A system message after the first message is converted to a user
    message with tags, because most chat templates accept a system message only at the start.

    Args:
        parts: the texts, media or tool calls to add, by field of the message.
    """
    if role == "system" and chat and chat[-1]["role"] != "system":
        role, parts = "user", {"content": f"<system>\n{parts['content']}\n</system>"}
    if not chat or chat[-1]["role"] != role:
        chat.append({"role": role})
    turn = chat[-1]
    for name, part in parts.items():
        turn.setdefault(name, []).append(part)


class TurnsReader:
    """Base class of readers that convert a conversation to the messages of a chat.

    Images in the results of tool calls are moved to the next user message, because chat templates accept only text in
    results.

    Attributes:
        chat: the messages. Consecutive messages of one role are joined.
        unknown: the paths of names that have no effect.
    """

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._shown: list[MediaSource] = []  # images in the results of tool calls
        self._media: list[MediaSource] = []  # of the joined messages
        self.chat: Chat = []
        self.unknown: dict[str, None] = {}

    def _add_shown(self) -> None:
        for image in self._shown:
            add_to_turn(self.chat, "user", content=image)
        self._shown.clear()

    def _join_turns(self) -> None:
        """Join the texts of each message with newlines. In a message with media, make them a list of parts."""
        for message in self.chat:
            for name in _JOINED_FIELDS:
                if isinstance(parts := message.get(name), list):
                    message[name] = _joined(parts, self._media)
            message.setdefault("content", "")

    def conversation(self) -> ChatMessages:
        """Return the joined messages as a chat template expects them, and their media."""
        return ChatMessages(tuple(map(_message_of_turn, self.chat)), self._media)


def _message_of_turn(turn: Message) -> Message:
    """Return a joined message as chat templates expect it."""
    if len(turn) == 2:
        return {"role": turn["role"], "content": turn["content"]}
    reasoning = _reasoning(turn["reasoning_content"]) if "reasoning_content" in turn else {}
    fields = {name: turn[name] for name in _TURN_FIELDS if name in turn}
    return {"role": turn["role"], "content": turn["content"], **reasoning, **fields}
