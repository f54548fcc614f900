"""Print a model's text without obeying control characters in it."""

from __future__ import annotations

import sys
from typing import TextIO

_KEPT = "\n\t"


def printable(text: str, to: TextIO | None = None) -> str:
    """Return the text as `to` can print it; on a terminal control characters become visible and have no effect.

    Args:
        to: None: standard output.
    """
    to = to or sys.stdout
    if to.isatty():
        text = "".join(_visible(sign) for sign in text)
    encoding = to.encoding or "utf-8"
    return text.encode(encoding, "replace").decode(encoding, "replace")


def _visible(sign: str) -> str:
    number = ord(sign)
    if number < 0x20 and sign not in _KEPT:
        return chr(0x2400 + number)
    # Delete, C1 controls, and controls of text direction.
    if 0x7F <= number < 0xA0 or 0x202A <= number <= 0x202E or 0x2066 <= number <= 0x2069:
        return "\N{REPLACEMENT CHARACTER}"
    return sign
