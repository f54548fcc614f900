"""Splits special tokens in texts that must be read as plain text, such as texts of a third party and summaries."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable

from handler.core.text import Vocabulary

_BREAK = "\u200b"  # an invisible character


def without_special_tokens(text: str, vocabulary: Vocabulary | None) -> str:
    """Return a text in which an invisible character splits each special token, so that it is encoded as plain text.

    Args:
        vocabulary: the model's vocabulary, or None if the special tokens are unknown. Then the text is unchanged.
    """
    specials = _special_texts(vocabulary)
    return text if specials is None else specials.sub(lambda match: match[0][0] + _BREAK + match[0][1:], text)


@functools.lru_cache(4)
def _special_texts(vocabulary: Vocabulary | None) -> re.Pattern[str] | None:
    """Return a pattern that matches the special tokens of a vocabulary, or None if it has none."""
    texts = [] if vocabulary is None else [text for text in vocabulary.marks if len(text) > 1]
    return re.compile(any_of(texts)) if texts else None


def any_of(texts: Iterable[str]) -> str:
    """Return an expression that matches the longest of some texts.

    Each character of a prefix occurs once in it, so a search takes linear time whatever text it searches. A vocabulary
    may have thousands of special tokens, and a client may send a megabyte of their first characters.
    """
    branches = []
    for _, members in itertools.groupby(sorted(texts), key=lambda text: text[0]):
        group = [*members]
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(group[0], group[-1], strict=False))
        prefix = "".join(character for character, _ in same)  # of the first and the last in order, so of all
        rests = [text[len(prefix) :] for text in group if text != prefix]
        rest = f"(?:{any_of(rests)}){'?' if prefix in group else ''}" if rests else ""
        branches.append(re.escape(prefix) + rest)
    return "|".join(branches)
