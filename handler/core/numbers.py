"""Parsing of ASCII numbers. `int`, `float`, `str.isdecimal` and `\\d` also accept the digits of other scripts."""

from __future__ import annotations


def is_digits(text: str | bytes) -> bool:
    """Return whether a text consists of the digits 0 to 9, and has at least one."""
    return text.isascii() and text.isdigit()


def whole(text: str) -> int:
    """Return the whole number that an ASCII text contains.

    Raises:
        ValueError: the text is not a whole number, or is not ASCII.
    """
    return int(text.encode("ascii"))


def decimal(text: str) -> float:
    """Return the number that an ASCII text contains, which may be infinite or NaN.

    Raises:
        ValueError: the text is not a number, or is not ASCII.
    """
    return float(text.encode("ascii"))
