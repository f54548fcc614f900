"""Bodies as JSON carries them: text, base64, or a JSON value."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from handler.replay.sources.json_members import Member


class BadBody(ValueError):
    """A body that cannot be had; says why."""


def from_base64(value: Any) -> bytes:
    """Decode base64.

    Raises:
        BadBody: it is none.
    """
    if not isinstance(value, str):
        raise BadBody("is not a string")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadBody(f"is not base64: {error}") from None


def from_text(value: Any) -> bytes:
    """Encode a text.

    Raises:
        BadBody: it is no text, or has half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise BadBody("is not a string")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise BadBody("has half of a surrogate pair, which is not text") from None


def from_member(member: Member) -> bytes:
    """Return the body that a member is: a string's text, or the JSON that stands there; null is none.

    Raises:
        BadBody: a string that is no text.
    """
    if member.value is None:
        return b""
    return from_text(member.value if isinstance(member.value, str) else member.text)
