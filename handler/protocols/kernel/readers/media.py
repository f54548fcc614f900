"""Readers of a chat's images: what a request carries is decoded from base64, a URL is left to the server."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from handler.core.errors import InvalidPayload
from handler.core.media import MediaSource
from handler.protocols.kernel.base import ServerContext

_SCHEMES = ("http", "https", "file")
_MAX_URL = 8192  # characters, but for data URLs
_PART = 1 << 18  # characters, a multiple of four: other threads may run between two parts

IMAGE = {"type": "image"}
"""An image's place in a message, as Hugging Face's chat templates expect it."""

ONLY_IN = "images stand in messages of the user"


def check_taken(kind: str, at: str, context: ServerContext) -> None:
    """Raise InvalidPayload where the engine takes no images; `kind` is the client's word for one."""
    if context.no_media:
        raise InvalidPayload(f"{at}: {kind!r} is not supported: {context.no_media}")


def image_of_url(url: Any, name: str) -> MediaSource:
    """Read a URL of an image.

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
            raise InvalidPayload(f"{name}: a data URL must be data:image/...;base64,...")
        return image_of_base64(url, name, start=len(scheme) + len(head) + 2)
    if scheme.lower() not in _SCHEMES:
        raise InvalidPayload(f"{name} must be an http, https, file or data URL")
    if len(url) > _MAX_URL:
        raise InvalidPayload(f"{name} has {len(url)} characters; a URL may have {_MAX_URL}")
    return MediaSource(None, url, name)


def image_of_base64(text: Any, name: str, *, start: int = 0) -> MediaSource:
    """Read an image's file in base64, from character number `start` on.

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
        raise InvalidPayload(f"{name}: the image is not base64") from None
    if not data:
        raise InvalidPayload(f"{name}: the image is empty")
    return MediaSource(data, "", name)


def check_number(media: list[MediaSource], context: ServerContext) -> None:
    """Raise InvalidPayload, naming the first image too many."""
    if len(media) > context.max_media:
        name = media[context.max_media].name
        raise InvalidPayload(f"{name}: a request may have {context.max_media} images (option.limit_mm_per_prompt)")
