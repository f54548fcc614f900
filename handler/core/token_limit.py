"""Refuses texts with too many tokens, before a tokenizer spends long on them while it holds the GIL."""

from __future__ import annotations

from collections.abc import Callable

from handler.core.errors import PromptTooLong

_SLACK = 16  # tokens that a cut may add


def check_tokens(text: str, name: str, limit: int, size: int, count: Callable[[str], int]) -> None:
    """Count the tokens of a text of more than `size` characters, part by part.

    Args:
        name: the client's name of the text.
        limit: tokens that it may have.
        size: characters of a part.
        count: counts the tokens of a part.

    Raises:
        PromptTooLong: it has more.
    """
    if len(text) <= size:
        return
    num_tokens = 0
    for start in range(0, len(text), size):
        num_tokens += max(0, count(text[start : start + size]) - _SLACK)
        if num_tokens > limit:
            raise PromptTooLong(name, num_tokens, limit, exact=False)
