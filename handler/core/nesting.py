"""How deeply lists and objects of JSON may be nested."""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 200
"""Levels of lists and objects. Templates and everything else that follows them recursively allow more."""


def is_too_deep(value: Any, text: str | bytes) -> bool:
    """Return whether a JSON value has more than MAX_DEPTH levels, whatever this version of Python can decode.

    Args:
        text: what the value was decoded from.
    """
    text = text if isinstance(text, str) else str(text, "latin-1")  # brackets are ASCII
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            member
            for item in level
            for member in (item.values() if isinstance(item, dict) else item)
            if isinstance(member, dict | list)
        ]
        if not level:
            return False
    return True
