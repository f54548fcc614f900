"""The API as an OpenAPI 3.1 document, built from the server's routes and the dialects' tables and types."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from handler import __version__
from handler.protocols.kernel.base import Dialect
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.description import Description, Operation
from handler.protocols.kernel.errors import FrontEndError
from handler.protocols.kernel.schema.shapes import TEXT, Shape, ref
from handler.protocols.kernel.schema.types import components_of, schema_of_type
from handler.protocols.openapi import operations, sessions
from handler.protocols.openapi.operations import GROUPS, INFERENCE, PATH_PARAMETERS
from handler.protocols.registry import dialects, dialects_of

_DESCRIPTION = (
    "Every route of this server. A refusal before the first token has its real status; what breaks later ends a "
    "stream with an error in it. Names that mean nothing are listed in the answer's header x-lmi-ignored-parameters."
)
_HEADERS: Shape = {
    "x-request-id": {"description": "The request's id, the client's own where it sent one", "schema": TEXT},
    "x-lmi-ignored-parameters": {"description": "Names in the body that meant nothing", "schema": TEXT},
}
_LOCKED = {"description": "No key, or a wrong one", "headers": {"www-authenticate": {"schema": TEXT}}}


_FOLDERS = dict.fromkeys(type(dialect).__module__.rpartition(".")[0] for dialect in dialects().values())
_DIALECTS: list[Any] = [importlib.import_module(f"{folder}.openapi") for folder in _FOLDERS]

DESCRIPTIONS: Mapping[str, Description] = {
    name: description for module in _DIALECTS for name, description in module.DESCRIPTIONS.items()
}
"""Dialect's name -> its bodies, out of `openapi.py` in the folder of each dialect in the registry."""

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    **operations.OPERATIONS,
    **{route: operation for module in _DIALECTS for route, operation in getattr(module, "OPERATIONS", {}).items()},
}
"""Method and path -> the operation, for routes that no description of a dialect covers."""


class DocumentedRoute(NamedTuple):
    """A route.

    Attributes:
        dialect: for inference, the dialect of its bodies.
        takes_calls: it takes calls about sessions.
    """

    path: str
    methods: Sequence[str]
    dialect: Dialect | None = None
    takes_calls: bool = False


def document(
    routes: Iterable[DocumentedRoute], context: ServerContext, *, locked: bool, has_sessions: bool = False
) -> dict[str, Any]:
    """Build the document.

    Args:
        context: names what the engine does not support.
        locked: the routes need a key, unless an operation is open.
        has_sessions: stateful sessions are on.
    """
    paths: dict[str, Any] = {}
    for route in routes:
        for method in route.methods:
            operation = _operation(route, method, locked)
            if has_sessions and route.dialect is not None and method == "POST":
                operation["parameters"] = [dict(sessions.PARAMETER)]
                if route.takes_calls:
                    sessions.add_calls(operation)
            paths.setdefault(route.path, _path_item(route.path))[method.lower()] = operation
    used = {tag for item in paths.values() for name, one in item.items() if name != "parameters" for tag in one["tags"]}
    result: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "lmi-handler", "version": __version__, "description": _DESCRIPTION},
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": what} for name, what in GROUPS.items() if name in used],
        "paths": paths,
        "components": {"schemas": {**components(context), **(sessions.COMPONENTS if has_sessions else {})}},
    }
    if locked:
        result["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        result["security"] = [{"key": []}, {"x-api-key": []}]
    return result


def components(context: ServerContext) -> dict[str, Shape]:
    """Return the schemas of all bodies, by name."""
    descriptions = DESCRIPTIONS.values()
    types = [
        *(kind for description in descriptions for kind in (description.answer, description.chunk, description.error)),
        *(kind for operation in OPERATIONS.values() for _, kind, _ in operation.answers.values()),
    ]
    return {description.request: description.request_shape(context) for description in descriptions} | components_of(
        [*types, FrontEndError]
    )


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
    if known is not None:
        operation = _other(known)
    elif route.dialect is not None and method == "POST":
        operation = _inference(route.path, [DESCRIPTIONS[dialect.name] for dialect in dialects_of(route.dialect)])
    else:
        operation = {"summary": route.path, "tags": ["State"], "responses": {"200": {"description": "It succeeded"}}}
    if locked and known is not None and known.open:
        shared["security"] = []
    elif locked:
        operation["responses"]["401"] = _LOCKED
    return {**shared, **operation}


def _streams(dialects: Sequence[Description]) -> dict[str, Any]:
    """Map content types to the schema of each value of a stream."""
    kinds = dict.fromkeys(kind for dialect in dialects for kind in dialect.streams)
    return {
        kind: {"schema": _any_of(_shapes(dialect.chunk for dialect in dialects if kind in dialect.streams))}
        for kind in kinds
    }


def _inference(path: str, dialects: Sequence[Description]) -> dict[str, Any]:
    """Describe a route that takes any of these dialects."""
    content = _streams(dialects)
    if whole := [dialect for dialect in dialects if dialect.answer]:
        content["application/json"] = {
            "schema": _any_of(_shapes(dialect.answer for dialect in whole)),
            "examples": {dialect.title: {"value": dialect.answer_example} for dialect in whole},
        }
    if any(dialect.texts for dialect in dialects):
        content["text/plain"] = {"schema": {"type": "string"}}
    titles = ", ".join(dialect.title for dialect in dialects)
    group, summary = INFERENCE.get(path, (next(iter(GROUPS)), f"Generate by {titles}"))
    return {
        "tags": [group],
        "summary": summary,
        "description": f"Takes bodies of {titles}.",
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": _any_of([ref(dialect.request) for dialect in dialects]),
                    "examples": {dialect.title: {"value": dialect.example} for dialect in dialects},
                },
                **_forms(dialects),
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
                    "application/json": {"schema": _any_of(_shapes(dialect.error for dialect in dialects))},
                    **_streams([dialect for dialect in dialects if dialect.refuses_in_frame]),
                },
            },
        },
    }


def _forms(dialects: Sequence[Description]) -> dict[str, Any]:
    shapes = [ref(dialect.request) for dialect in dialects if dialect.forms]
    return {"multipart/form-data": {"schema": _any_of(shapes)}} if shapes else {}


def _shapes(kinds: Iterable[Any]) -> list[Shape]:
    """Return the schemas of the types, those of a union one by one."""
    shapes = [schema_of_type(kind) for kind in kinds]
    return [member for shape in shapes for member in shape.get("anyOf", [shape])]


def _any_of(shapes: Sequence[Shape]) -> Shape:
    distinct = [shape for index, shape in enumerate(shapes) if shape not in shapes[:index]]
    return distinct[0] if len(distinct) == 1 else {"anyOf": distinct} if distinct else {}


def _other(known: Operation) -> dict[str, Any]:
    operation: dict[str, Any] = {"tags": [known.tag], "summary": known.summary, "responses": {}}
    if known.query:
        operation["parameters"] = [
            {"name": name, "in": "query", "schema": shape} for name, shape in known.query.items()
        ]
    if known.body is not None:
        operation["requestBody"] = {"content": {"application/json": {"schema": known.body}}}
    for status, answer in known.answers.items():
        response: dict[str, Any] = {"description": "It succeeded" if status < 300 else "It did not"}
        content_type, kind, example = answer
        response["content"] = {content_type: {"schema": schema_of_type(kind), "example": example}}
        operation["responses"][str(status)] = response
    return operation
