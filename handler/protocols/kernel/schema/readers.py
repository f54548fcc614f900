"""JSON Schema of readers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Reader = TypeVar("Reader", bound=Callable[..., Any])

_NAME = "json_schema"


def accepts(**schema: Any) -> Callable[[Reader], Reader]:
    """Attach the JSON Schema of a reader's values, for the API's document."""

    def mark(read: Reader) -> Reader:
        setattr(read, _NAME, schema)
        return read

    return mark


def schema_of_reader(read: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON Schema of a reader's values; empty where `accepts` attached none."""
    schema: dict[str, Any] = getattr(read, _NAME, {})
    return schema
