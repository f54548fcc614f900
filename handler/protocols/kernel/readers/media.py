"""Readers of a chat's media: what a request carries is decoded from base64, a URL is left to the server."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from handler.core.errors import InvalidPayload
from handler.core.media import MEDIA, MediaSource
from handler.protocols.kernel.context import DEFAULT_MAX_MEDIA, ServerContext

_SCHEMES = ("http", "https", "file")
_MAX_URL = 8192  # characters, but for data URLs
_PART = 1 << 18  # characters, a multiple of four: other threads may run between two parts

_TEXT_ONLY = "the engine reads text only"


def place(source: MediaSource) -> dict[str, Any]:
    """Return a medium's place in a message, as Hugging Face's chat templates expect it."""
    return {"type": source.kind}


def only_in(kind: str) -> str:
    return f"{MEDIA[kind]} belong in messages of the user"


def taken_media(context: ServerContext) -> list[str]:
    """Return the kinds of media that messages may have."""
    return [kind for kind in MEDIA if not context.no_media.get(kind, _TEXT_ONLY)]


def check_taken(kind: str, word: str, at: str, context: ServerContext) -> None:
    """Raise InvalidPayload where the engine takes no media of a kind; `word` is the client's for one."""
    if reason := context.no_media.get(kind, _TEXT_ONLY):
        raise InvalidPayload(f"{at}: {word!r} is not supported: {reason}")


def read_url(kind: str, url: Any, name: str) -> MediaSource:
    """Read a URL of a medium.

    Args:
        name: the field's path, for messages.

    Raises:
        InvalidPayload: it is none, or a data URL that is wrong.
    """
    if not isinstance(url, str) or not url:
        raise InvalidPayload(f"{name} must be a URL")
    scheme, _, rest = url[:_MAX_URL].partition(":")
    if scheme.lower() == "data":
        head, comma, _ = rest.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise InvalidPayload(f"{name}: a data URL must be data:{kind}/...;base64,...")
        return read_base64(kind, url, name, start=len(scheme) + len(head) + 2)
    if scheme.lower() not in _SCHEMES:
        raise InvalidPayload(f"{name} must be an http, https, file or data URL")
    if len(url) > _MAX_URL:
        raise InvalidPayload(f"{name} has {len(url)} characters; a URL may have {_MAX_URL}")
    return MediaSource(kind, None, url, name)


def read_base64(kind: str, text: Any, name: str, *, start: int = 0) -> MediaSource:
    """Read a medium's file in base64, from character number `start` on.

    Raises:
        InvalidPayload: it is not base64, or empty.
    """
    if not isinstance(text, str):
        raise InvalidPayload(f"{name} must be a string")
    try:
        if "=" in text[start:-2]:
            raise ValueError
        parts = range(start, len(text), _PART)
        data = b"".join([base64.b64decode(text[at : at + _PART], validate=True) for at in parts])
    except (binascii.Error, ValueError):
        raise InvalidPayload(f"{name}: the {kind} is not base64") from None
    if not data:
        raise InvalidPayload(f"{name}: the {kind} is empty")
    return MediaSource(kind, data, "", name)


def check_number(media: list[MediaSource], context: ServerContext) -> None:
    """Raise InvalidPayload, naming the first medium too many of a kind."""
    for kind, several in MEDIA.items():
        most = context.max_media.get(kind, DEFAULT_MAX_MEDIA)
        if more := [source.name for source in media if source.kind == kind][most:]:
            raise InvalidPayload(f"{more[0]}: a request may have {most} {several} (option.limit_mm_per_prompt)")
