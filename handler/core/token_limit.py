"""Refuses texts that have too many tokens, before a tokenizer is busy with them for long.

A tokenizer may hold the GIL while it works, and its result is made into Python objects, or freed, under it.
"""

from __future__ import annotations

from collections.abc import Callable

from handler.core.errors import PromptTooLong

_SLACK = 16  # tokens that a cut may add


def check_tokens(text: str, name: str, most: int, size: int, count: Callable[[str], int]) -> None:
    """Count the tokens of a text that is longer than `size` characters, part by part.

    Args:
        name: what the client calls the text.
        most: tokens that it may have.
        size: characters of a part.
        count: the tokens of a part.

    Raises:
        PromptTooLong: it has more.
    """
    if len(text) <= size:
        return
    tokens = 0
    for start in range(0, len(text), size):
        tokens += max(0, count(text[start : start + size]) - _SLACK)
        if tokens > most:
            raise PromptTooLong(name, tokens, most, exact=False)
