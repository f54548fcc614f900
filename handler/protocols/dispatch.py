"""One route, several dialects: the shape of a body says which of them reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.core.errors import InvalidPayload, ServingError
from handler.protocols.base import HttpResponse, ParsedRequest, Schema, ServerContext


class ByShape:
    """A body with `inputs` is the mode's own; of the others the first dialect whose field it has reads it.

    Null is absent.

    Args:
        mode: the dialect of this configuration, which also answers what no dialect can read.
        others: the field by which a dialect is known -> the dialect.
    """

    def __init__(self, mode: Schema, others: Mapping[str, Schema]) -> None:
        self.name = mode.name
        self.any_media = mode.any_media
        self._mode = mode
        self._others = others

    @property
    def dialects(self) -> tuple[Schema, ...]:
        """All that it chooses from, the mode first."""
        return self._mode, *self._others.values()

    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        return self._dialect(body).parse(body, context)

    def _dialect(self, body: Any) -> Schema:
        if isinstance(body, dict) and body.get("inputs") is None:
            for field, dialect in self._others.items():
                if body.get(field) is not None:
                    return dialect
        return self._mode

    def refused(self, error: ServingError, body: Any = None, context: ServerContext | None = None) -> HttpResponse:
        return self._dialect(body).refused(error, body, context)


class Refusing:
    """A dialect that a mode does not have: refused by name, in the mode's own form."""

    def __init__(self, mode: Schema, why: str) -> None:
        self.name = f"no_{mode.name}"
        self.any_media = mode.any_media
        self._mode = mode
        self._why = why

    def parse(self, body: Any, context: ServerContext) -> ParsedRequest:
        raise InvalidPayload(self._why)

    def refused(self, error: ServingError, body: Any = None, context: ServerContext | None = None) -> HttpResponse:
        return self._mode.refused(error, body, context)
