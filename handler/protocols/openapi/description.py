"""A dialect's bodies as the API's document describes them."""

from __future__ import annotations

from typing import Any, NamedTuple

from handler.protocols.openapi.json_schema import RequestShape


class Description(NamedTuple):
    """The bodies of one dialect, with examples that any model can answer.

    Attributes:
        request: the name of the request's component.
        request_shape: the schema of that component.
        error: the type of an error's body.
        answer: the type of a whole answer; None where the route always streams.
        chunk: the type of one value of a stream; None where the route never streams.
        streams: content types of streams; each value is framed by itself.
        refuses_in_frame: a refused request for a stream gets one `chunk`, framed as the stream would be.
    """

    title: str
    request: str
    request_shape: RequestShape
    error: Any
    example: Any
    answer: Any = None
    answer_example: Any = None
    chunk: Any = None
    streams: tuple[str, ...] = ()
    refuses_in_frame: bool = False
