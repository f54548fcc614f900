"""The server's API as an OpenAPI 3.1 document: made from the routes that it has and the dialects' own tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from handler import __version__
from handler.protocols.base import FrontEndError, Schema, ServerContext
from handler.protocols.lmi import openapi as lmi
from handler.protocols.openai import openapi as openai
from handler.protocols.openapi import operations
from handler.protocols.openapi.description import Description
from handler.protocols.openapi.json_schema import TEXT, Shape, components_of, ref, schema_of_type
from handler.protocols.openapi.operations import PATH_PARAMETERS, Operation
from handler.protocols.registry import DispatchByField
from handler.protocols.tgi import openapi as tgi
from handler.protocols.triton import openapi as triton

_DESCRIPTION = (
    "Every route of this server. A refusal before the first token has its real status; what breaks later ends a "
    "stream with an error in it. Names that mean nothing are listed in the answer's header x-lmi-ignored-parameters."
)
_HEADERS: Shape = {
    "x-request-id": {"description": "The request's id, the client's own where it sent one", "schema": TEXT},
    "x-lmi-ignored-parameters": {"description": "Names in the body that meant nothing", "schema": TEXT},
}
_LOCKED = {"description": "No key, or a wrong one", "headers": {"www-authenticate": {"schema": TEXT}}}


DESCRIPTIONS: Mapping[str, Description] = {
    **lmi.DESCRIPTIONS,
    **tgi.DESCRIPTIONS,
    **openai.DESCRIPTIONS,
    **triton.DESCRIPTIONS,
}
"""By the dialect's name. docs/wire.md is the text beside this."""

NOT_SERVED = frozenset({"no_dynamic_batch"})
"""Dialects that only refuse."""

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    **operations.OPERATIONS,
    **tgi.OPERATIONS,
    **openai.OPERATIONS,
    **triton.OPERATIONS,
}
"""By method and path."""


class DocumentedRoute(NamedTuple):
    """A route: its path, the methods that it answers, and, of inference, the dialect of its bodies."""

    path: str
    methods: Sequence[str]
    schema: Schema | None = None


def document(routes: Iterable[DocumentedRoute], context: ServerContext, *, locked: bool) -> dict[str, Any]:
    """The whole of it.

    Args:
        context: says what the engine lacks.
        locked: a key is needed, except where the operation says otherwise.
    """
    paths: dict[str, Any] = {}
    for route in routes:
        for method in route.methods:
            operation = _operation(route, method, locked)
            paths.setdefault(route.path, _path_item(route.path))[method.lower()] = operation
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "lmi-handler", "version": __version__, "description": _DESCRIPTION},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": components(context)},
    }
    if locked:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def components(context: ServerContext) -> dict[str, Shape]:
    """The schemas of all bodies, by name."""
    descriptions = DESCRIPTIONS.values()
    types = [kind for one in descriptions for kind in (one.answer, one.chunk, one.error)]
    return {one.request: one.request_shape(context) for one in descriptions} | components_of([*types, FrontEndError])


def _path_item(path: str) -> dict[str, Any]:
    names = re.findall(r"\{(\w+)\}", path)
    item: dict[str, Any] = {}
    if names:
        item["parameters"] = [
            {
                "name": name,
                "in": "path",
                "required": True,
                "schema": TEXT,
                "description": PATH_PARAMETERS.get(name, name),
            }
            for name in names
        ]
    return item


def _operation(route: DocumentedRoute, method: str, locked: bool) -> dict[str, Any]:
    name = re.sub(r"\W+", "_", route.path.strip("/")) or "root"
    shared: dict[str, Any] = {"operationId": f"{method.lower()}_{name.strip('_')}"}
    known = OPERATIONS.get((method, route.path))
    if route.schema is not None and method == "POST":
        found = _inference(dialects_of(route.schema))
    elif known is not None:
        found = _other(known)
    else:
        found = {"summary": route.path, "tags": ["Other"], "responses": {"200": {"description": "It succeeded"}}}
    if locked and known is not None and known.open:
        shared["security"] = []
    elif locked:
        found["responses"]["401"] = _LOCKED
    return {**shared, **found}


def dialects_of(schema: Schema) -> list[Description]:
    """The dialects of a route's bodies."""
    schemas = schema.dialects if isinstance(schema, DispatchByField) else (schema,)
    return [DESCRIPTIONS[one.name] for one in schemas if one.name not in NOT_SERVED]


def _streams(dialects: Sequence[Description]) -> dict[str, Any]:
    """By content type, what each value of a stream is."""
    kinds = dict.fromkeys(kind for one in dialects for kind in one.streams)
    return {kind: {"schema": _any_of(_shapes(one.chunk for one in dialects if kind in one.streams))} for kind in kinds}


def _inference(dialects: Sequence[Description]) -> dict[str, Any]:
    """A route that takes any of these: the first is what it is called after."""
    content = _streams(dialects)
    if whole := [one for one in dialects if one.answer]:
        content["application/json"] = {
            "schema": _any_of(_shapes(one.answer for one in whole)),
            "examples": {one.title: {"value": one.answer_example} for one in whole},
        }
    titles = [one.title for one in dialects]
    return {
        "tags": [titles[0] if titles else "Inference"],
        "summary": f"Generate text: {', '.join(titles)}",
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": _any_of([ref(one.request) for one in dialects]),
                    "examples": {one.title: {"value": one.example} for one in dialects},
                }
            },
        },
        "responses": {
            "200": {
                "description": "The answer; of a stream, the schema is that of each value in it",
                "headers": _HEADERS,
                "content": content,
            },
            "default": {
                "description": "A refusal, or a failure before the first token",
                "content": {
                    "application/json": {"schema": _any_of(_shapes(one.error for one in dialects))},
                    **_streams([one for one in dialects if one.refuses_in_frame]),
                },
            },
        },
    }


def _shapes(kinds: Iterable[Any]) -> list[Shape]:
    """The schemas of the types, those of a union one by one."""
    shapes = [schema_of_type(kind) for kind in kinds]
    return [one for shape in shapes for one in shape.get("anyOf", [shape])]


def _any_of(shapes: Sequence[Shape]) -> Shape:
    distinct = [shape for index, shape in enumerate(shapes) if shape not in shapes[:index]]
    return distinct[0] if len(distinct) == 1 else {"anyOf": distinct} if distinct else {}


def _other(known: Operation) -> dict[str, Any]:
    found: dict[str, Any] = {"tags": [known.tag], "summary": known.summary, "responses": {}}
    if known.query:
        found["parameters"] = [{"name": name, "in": "query", "schema": shape} for name, shape in known.query.items()]
    if known.body is not None:
        found["requestBody"] = {"content": {"application/json": {"schema": known.body}}}
    for status, answer in known.answers.items():
        response: dict[str, Any] = {"description": "It succeeded" if status < 300 else "It did not"}
        if answer is not None:
            kind, shape, example = answer
            response["content"] = {kind: {"schema": shape, "example": example}}
        found["responses"][str(status)] = response
    return found
