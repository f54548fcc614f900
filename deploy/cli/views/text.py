"""A model's text on a terminal: shown, and never obeyed."""

from __future__ import annotations

import sys
from typing import TextIO

_KEPT = "\n\t"


def shown(text: str, to: TextIO | None = None) -> str:
    """The text as `to` can print it: on a terminal, control characters are seen and do nothing.

    Args:
        to: None: standard output.
    """
    to = to or sys.stdout
    if to.isatty():
        text = "".join(_seen(sign) for sign in text)
    encoding = to.encoding or "utf-8"
    return text.encode(encoding, "replace").decode(encoding, "replace")


def _seen(sign: str) -> str:
    number = ord(sign)
    if number < 0x20 and sign not in _KEPT:
        return chr(0x2400 + number)
    if 0x7F <= number < 0xA0 or 0x202A <= number <= 0x202E or 0x2066 <= number <= 0x2069:  # and turning text around
        return "\N{REPLACEMENT CHARACTER}"
    return sign
