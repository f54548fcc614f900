"""Parses ASCII numbers. `int`, `float`, `str.isdecimal` and `\\d` also accept the digits of other scripts."""

from __future__ import annotations


def is_digits(text: str | bytes) -> bool:
    """Return whether text consists only of the digits 0 to 9 and is not empty."""
    return text.isascii() and text.isdigit()


def whole(text: str) -> int:
    """Parse ASCII text as a whole number.

    Raises:
        ValueError: the text is not a whole number, or is not ASCII.
    """
    return int(text.encode("ascii"))


def decimal(text: str) -> float:
    """Parse ASCII text as a number, which may be infinite or NaN.

    Raises:
        ValueError: the text is not a number, or is not ASCII.
    """
    return float(text.encode("ascii"))
