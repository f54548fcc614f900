"""Fields of recordings: JSON members, bodies, statuses, URLs, times."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from datetime import datetime, timezone
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from handler.core.secrets import path_without_credentials

_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


class Member(NamedTuple):
    """A member's value, and its JSON text as it stood there."""

    value: Any
    text: str


ABSENT = Member(None, "null")


class Malformed(ValueError):
    """Something recorded that is not as its kind has it; says which field is wrong."""


def members(text: str) -> dict[str, Member]:
    """Read a JSON object. Of a name that comes twice the last one counts.

    Raises:
        Malformed: it is something else, is cut off, or nests too deeply.
    """
    try:
        return _members(text)
    except Malformed:
        raise
    except RecursionError:
        raise Malformed("it nests too deeply") from None
    except (ValueError, StopIteration) as error:
        raise Malformed(f"it is not JSON: {str(error)[:100] or 'a value is missing'}") from None


def _members(text: str) -> dict[str, Member]:
    at = _after_space(text, 0)
    if text[at : at + 1] != "{":
        raise Malformed("it is not a JSON object" if text[at:] else "it is empty")
    found: dict[str, Member] = {}
    at = _after_space(text, at + 1)
    if text[at : at + 1] == "}":
        return _ended(text, at + 1, found)
    while True:
        if text[at : at + 1] != '"':
            raise Malformed("it is not JSON: it ends early, or a name is missing")
        name, at = _DECODER.raw_decode(text, at)
        at = _after_space(text, at)
        if text[at : at + 1] != ":":
            raise Malformed("it is not JSON: it ends early, or a colon is missing")
        begin = _after_space(text, at + 1)
        value, end = _DECODER.raw_decode(text, begin)
        found[name] = Member(value, text[begin:end])
        at = _after_space(text, end)
        mark = text[at : at + 1]
        if mark == "}":
            return _ended(text, at + 1, found)
        if mark != ",":
            raise Malformed("it is not JSON: it ends early, or a comma is missing")
        at = _after_space(text, at + 1)


def _ended(text: str, at: int, found: dict[str, Member]) -> dict[str, Member]:
    if _after_space(text, at) != len(text):
        raise Malformed("it is not JSON: something follows the object")
    return found


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


# -- fields that several kinds of recordings have: bodies as text, base64 or JSON, statuses, URLs ----------------------


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
    """Return whether a value may be HTTP's status; 0 where nobody knows it."""
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


# -- times of recordings, in seconds since the epoch -------------------------------------------------------------------


def seconds(value: Any) -> float | None:
    """Return a time that is a number, or ISO 8601; None for anything else. Without a zone it is UTC."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value) if abs(value) < 1e12 and math.isfinite(value) else None
    if not isinstance(value, str) or len(value) > 40:
        return None
    try:
        found = datetime.fromisoformat(_to_microseconds(value.strip().replace("Z", "+00:00").replace("z", "+00:00")))
        return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()
    except (ValueError, OverflowError):
        return None


def _to_microseconds(text: str) -> str:
    """Give the fraction six digits, as Python 3.10 wants it."""
    head, dot, rest = text.partition(".")
    if not dot:
        return text
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    return f"{head}.{digits[:6]:0<6}{rest[len(digits) :]}"
