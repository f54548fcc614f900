"""What a dialect's bodies are described by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from handler.protocols.base import ServerContext
from handler.protocols.openapi.shapes import Shape

Components = Mapping[str, Callable[[ServerContext], Shape]]
"""Schemas by name; one that holds parameters is made for the engine that is served."""


def always(shape: Shape) -> Callable[[ServerContext], Shape]:
    """One that is the same for every engine."""
    return lambda context: shape


class Dialect(NamedTuple):
    """Names of components, but for the examples, which any model can answer.

    Attributes:
        answer: one in one piece; "" where it has none.
        chunk: one value of a stream; "" where it has none.
        streams: content types of its streams, each value framed by itself.
        refuses_in_frame: a refused request for a stream is answered with one `chunk`, framed as the stream would be.
    """

    title: str
    request: str
    answer: str
    error: str
    example: Any
    answer_example: Any
    chunk: str = ""
    streams: tuple[str, ...] = ()
    refuses_in_frame: bool = False
