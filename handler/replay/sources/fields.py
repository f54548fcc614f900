"""Fields that several kinds of recordings have: bodies as text, base64 or JSON, statuses, URLs."""

from __future__ import annotations

import base64
import binascii
from typing import Any
from urllib.parse import SplitResult, urlsplit

from handler.core.recorded_headers import path_without_credentials
from handler.replay.sources.json_members import Malformed, Member


def from_base64(value: Any, name: str) -> bytes:
    """Decode base64.

    Raises:
        Malformed: it is none.
    """
    if not isinstance(value, str):
        raise Malformed(f"{name}: is not a string")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Malformed(f"{name}: is not base64: {error}") from None


def from_text(value: Any, name: str) -> bytes:
    """Encode a text.

    Raises:
        Malformed: it is no text, or has half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise Malformed(f"{name}: is not a string")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise Malformed(f"{name}: has half of a surrogate pair, which is not text") from None


def from_member(member: Member, name: str) -> bytes:
    """Return the body that a member is: a string's text, or the JSON that stands there; null is none.

    Raises:
        Malformed: a string that is no text.
    """
    if member.value is None:
        return b""
    return from_text(member.value if isinstance(member.value, str) else member.text, name)


def is_status(value: Any) -> bool:
    """Whether a value may be HTTP's status; 0 where nobody knows it."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1000


def split_url(url: str, name: str) -> SplitResult:
    """Split a URL.

    Raises:
        Malformed: it is none.
    """
    try:
        return urlsplit(url)
    except ValueError:
        raise Malformed(f"{name}: is no URL") from None


def path_of(parts: SplitResult) -> str:
    """Return the path with its query, without keys."""
    return path_without_credentials((parts.path or "/") + (f"?{parts.query}" if parts.query else ""))
