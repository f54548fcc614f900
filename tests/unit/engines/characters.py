"""Texts and classes with letters that an escape may spoil, beside letters that could be read as part of the escape."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

LATIN = [chr(code) for code in range(0xA0, 0x100)]
CONTROLS = [chr(code) for code in (*range(1, 0x20), 0x7F, *range(0x80, 0xA0))]
OTHERS = ["\u0100", "\u0301", "\u07ff", "\u0800", "\u2028", "\ufeff", "\uffff", "漢", "ж", "😀", "\U0010ffff"]
SIGNS = ['"', "'", "\\", "[", "]", "^", "-", "{", "}", "/", "$", "|", ".", "#", " ", "~"]
FOLLOWING = ["0", "9", "a", "F", "g", "-", "é", "漢", '"', "\\"]


def pairs(letters: list[str] | None = None, following: list[str] | None = None) -> Iterator[str]:
    """Yield each letter with each text that may follow it."""
    first = [*LATIN, *CONTROLS, *OTHERS, *SIGNS] if letters is None else letters
    yield from map("".join, itertools.product(first, FOLLOWING if following is None else following))
