"""What the API's document says of a dialect's bodies, and of a route without inference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.parameters import REQUEST_FIELDS, Parameter, Table
from handler.protocols.kernel.schema.readers import schema_of_reader
from handler.protocols.kernel.schema.shapes import Shape, nullable, record

RequestShape = Callable[[ServerContext], Shape]
"""The schema of a request's body for one server: parameters name what its engine does not support."""


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
        forms: a body may also be a form.
        texts: a whole answer may also be plain text.
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
    forms: bool = False
    texts: bool = False


Answer = tuple[str, Any, Any]
"""Content type, type and example of an answer."""


class Operation(NamedTuple):
    """A route that is not for inference.

    Attributes:
        answers: status -> content type, type and example.
        query: names in the query, with their schemas.
        body: schema of an optional JSON body.
        open: needs no key.
    """

    tag: str
    summary: str
    answers: Mapping[int, Answer]
    query: Mapping[str, Shape] = MappingProxyType({})
    body: Shape | None = None
    open: bool = False


def parameter(entry: Parameter, context: ServerContext) -> Shape:
    """Return the schema of a parameter, null included. It names what the engine does not support."""
    shape = dict(schema_of_reader(entry.read))
    if why := context.unsupported.get(entry.field):
        shape["description"] = f"Refused: the engine {context.engine} lacks it: {why}"
    return nullable(shape) if shape else shape


def parameters(table: Mapping[str, Parameter], context: ServerContext) -> dict[str, Shape]:
    return {name: parameter(entry, context) for name, entry in table.items()}


def request_shape(fields: Mapping[str, Shape], table: Table, *required: str) -> RequestShape:
    """Make the schema of a body from what its readers read.

    Args:
        fields: those that set no parameter, by name.
        required: names in either.
    """

    def shape(context: ServerContext) -> Shape:
        known = {**fields, **parameters(table.parameters, context)}
        needed = {
            name: schema_of_reader(table.parameters[name].read) if name in table.parameters else known[name]
            for name in required
        }
        return record(needed, {name: item for name, item in known.items() if name not in needed})

    return shape


def request_fields(readers: Mapping[str, Callable[[Any], Any]] = REQUEST_FIELDS) -> dict[str, Shape]:
    return {name: nullable(schema_of_reader(read)) for name, read in readers.items()}
