"""What a parameter's reader takes, in the words of JSON Schema: for the API's document, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Reader = TypeVar("Reader", bound=Callable[..., Any])

_NAME = "json_schema"


def takes(**schema: Any) -> Callable[[Reader], Reader]:
    """Say it of a reader, where it is written, so that the two change together."""

    def mark(read: Reader) -> Reader:
        setattr(read, _NAME, schema)
        return read

    return mark


def taken(read: Callable[..., Any]) -> dict[str, Any] | None:
    """What was said of a reader; None when nothing was."""
    found: dict[str, Any] | None = getattr(read, _NAME, None)
    return found
