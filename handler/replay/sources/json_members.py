"""Read one JSON object of a line, with the text of each member: a body keeps the bytes that were recorded."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

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
