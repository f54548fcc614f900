"""Whether a model takes media of a kind, by its config.json."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from handler.config import model_files
from handler.core.media import MEDIA, MediaTokens
from handler.engines.base import NO_MEDIA

Read = Callable[[Mapping[str, Any], Path], MediaTokens | str | None]
"""Returns how a model counts the tokens, or why it takes none; None where its type is unknown."""


def read_tokens(model: Path | None, kind: str, read: Read, parts: Collection[str]) -> MediaTokens | str:
    """Return how a model counts the tokens of media of a kind, or the reason why it takes none.

    Args:
        model: a Hugging Face directory, or what was made of one.
        parts: fields of config.json that models with such media have.
    """
    if model is None or not model.is_dir():
        return NO_MEDIA
    config = model_files.read_json(model / "config.json")
    if (found := read(config, model)) is not None:
        return found
    if config.keys().isdisjoint(parts):
        return NO_MEDIA
    return f"{MEDIA[kind]} are not supported for model_type {config.get('model_type')} (config.json)"
