"""Tokens of media in prompts: placeholders, and which kinds a model takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from handler.core.media import MEDIA, MediaTokens, Medium
from handler.engines.base import NO_MEDIA
from handler.engines.huggingface.audio_tokens import read_audio_tokens
from handler.engines.huggingface.image_tokens import read_image_tokens

_READERS: dict[str, Callable[[Path | None], MediaTokens | str]] = {
    "image": read_image_tokens,
    "audio": read_audio_tokens,
}
"""By kind: return how a model counts the tokens of such media, or the reason why it takes none."""


def media_tokens(model: Path | None) -> dict[str, MediaTokens]:
    """Return how a model counts the tokens of the media that it takes, by kind.

    Args:
        model: a Hugging Face directory, or what was made of one.
    """
    found = {kind: read(model) for kind, read in _READERS.items()}
    return {kind: tokens for kind, tokens in found.items() if not isinstance(tokens, str)}


def no_media(model: Path | None) -> dict[str, str]:
    """Return the reasons why a model takes no media of a kind; "" where it does."""
    found = {kind: read(model) for kind, read in _READERS.items()}
    reasons = {kind: tokens if isinstance(tokens, str) else "" for kind, tokens in found.items()}
    text_only = all(reason == NO_MEDIA for reason in reasons.values())
    return {
        kind: f"the model takes no {MEDIA[kind]}" if reason == NO_MEDIA and not text_only else reason
        for kind, reason in reasons.items()
    }


def expand(ids: Sequence[int], counts: Mapping[str, Sequence[int]], tokens: Mapping[str, MediaTokens]) -> list[int]:
    """Repeat each placeholder as often as its medium has tokens.

    Args:
        counts: tokens of each medium, by kind.

    Raises:
        ValueError: there are not as many placeholders of a kind as media.
    """
    result = list(ids)
    for kind, numbers in counts.items():
        placeholder = tokens[kind].placeholder
        found = result.count(placeholder)
        if found != len(numbers):
            raise ValueError(f"the chat template makes {found} placeholders for {len(numbers)} {MEDIA[kind]}")
        left = iter(numbers)
        result = [id for given in result for id in ([placeholder] * next(left) if given == placeholder else [given])]
    return result


def collapse(ids: Sequence[int], media: Sequence[Medium], tokens: Mapping[str, MediaTokens]) -> list[int]:
    """Undo `expand`.

    Raises:
        ValueError: a placeholder does not stand there as often as its medium has tokens.
    """
    for kind, one in tokens.items():
        counts = [one.count(medium.size) for medium in media if medium.kind == kind]
        ids = _collapse(ids, one.placeholder, counts, MEDIA[kind])
    return list(ids)


def _collapse(ids: Sequence[int], placeholder: int, counts: Sequence[int], word: str) -> list[int]:
    wrong = ValueError(f"the prompt has not as many placeholders as its {word} have tokens")
    result: list[int] = []
    left, position = list(counts), 0
    while position < len(ids):
        id = ids[position]
        size = left.pop(0) if id == placeholder and left else 1
        if id == placeholder and list(ids[position : position + size]) != [id] * size:
            raise wrong
        result.append(id)
        position += size
    if left or result.count(placeholder) != len(counts):
        raise wrong
    return result


def prompt_text(
    ids: Sequence[int], text: str, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str]
) -> str:
    """Return the text of a prompt for an engine that takes no ids: `text`, then that of further ids, as of a thought.

    Args:
        text: of the prompt, or of its beginning, or "".
        encode, decode: the engine's, with special tokens in the text and none added.

    Raises:
        ValueError: the engine would compute other ids.
    """
    known = encode(text) if text else []
    if list(ids[: len(known)]) == known:
        text += decode(list(ids[len(known) :]))
        if encode(text) == list(ids):
            return text
    raise ValueError(
        "the engine takes vision models' prompts as text, and no text has exactly this prompt's tokens "
        "(a prompt of ids, a cut prompt, or what follows a thought)"
    )
