"""The `messages` of a chat, which several dialects share: roles and text, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.errors import InvalidPayload

ROLES = ("system", "user", "assistant")

_MEDIA = ("image_url", "image", "input_image", "input_audio", "audio_url", "video_url", "file")
"""Types of parts that other servers take, to be refused by their name."""


def read_messages(value: Any) -> tuple[tuple[Mapping[str, str], ...], list[str]]:
    """The messages as the tokenizer takes them, and the names in them that mean nothing here.

    Raises:
        InvalidPayload: saying which message is wrong and what would have been right; it quotes no content.
    """
    if not isinstance(value, list) or not value:
        raise InvalidPayload("'messages' must be a non-empty list")
    messages, unknown = [], dict[str, None]()
    for index, message in enumerate(value):
        at = f"messages[{index}]"
        if not isinstance(message, dict):
            raise InvalidPayload(f"{at} must be an object with 'role' and 'content'")
        role = message.get("role")
        if role not in ROLES:
            raise InvalidPayload(f"{at}.role must be one of {', '.join(ROLES)}")
        messages.append({"role": role, "content": _text(message.get("content"), f"{at}.content")})
        unknown |= {f"messages[].{name}": None for name in message if name not in ("role", "content")}
    return tuple(messages), list(unknown)


def _text(content: Any, at: str) -> str:
    """A string, or text parts, which LMI and vLLM join with line ends."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidPayload(f"{at} must be a string or a non-empty list of parts")
    return "\n".join([_part(part, f"{at}[{index}]") for index, part in enumerate(content)])


def _part(part: Any, at: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in _MEDIA:
        raise InvalidPayload(f"{at}: '{kind}' is not supported: the engine reads text only")
    if kind != "text" or not isinstance(part.get("text"), str):
        raise InvalidPayload(f"{at} must be an object with 'type': 'text' and a string 'text'")
    return str(part["text"])
