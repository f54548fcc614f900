"""The OpenAPI 3.1 document, which is built from the server routes and the tables and types of the dialects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from handler import __version__
from handler.protocols.api import SessionAnswer
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.dialect import Description, Dialect
from handler.protocols.kernel.errors import FrontEndError
from handler.protocols.kernel.schema import TEXT, Shape, components_of, record, ref, schema_of_type
from handler.protocols.operations import GROUPS, INFERENCE, OPERATIONS, PATH_PARAMETERS, Operation, example_response
from handler.protocols.registry import dialects, dialects_of

# -- calls that open or close a stateful session (docs/sessions.md) ----------------------------------------------------


SESSION_COMPONENTS: Mapping[str, Shape] = {
    "SessionCall": record(
        {"requestType": {"enum": ["NEW_SESSION", "CLOSE"]}},
        description="Opens or closes a session. No other fields are allowed",
        additionalProperties=False,
    ),
    **components_of([SessionAnswer]),
}

SESSION_PARAMETER: Mapping[str, Any] = {
    "name": "X-Amzn-SageMaker-Session-Id",
    "in": "header",
    "schema": TEXT,
    "description": "The id of the session, or NEW_SESSION in the call that opens a session",
}
"""The header that contains the session id. It is optional in every inference request."""

_SESSION_ID = {
    "description": "The new session's id and expiry time (UTC), such as `ID; Expires=2026-11-22T01:30:39Z`",
    "schema": TEXT,
}

_SESSION_HEADERS: Mapping[str, Shape] = {
    "x-amzn-sagemaker-new-session-id": _SESSION_ID,
    "x-amzn-sagemaker-session-id": _SESSION_ID,
    "x-amzn-sagemaker-closed-session-id": {"description": "The closed session's id", "schema": TEXT},
}

_SESSION_EXAMPLE = {"result": "Session 6a1f4c2f-0d0c-4c7e-9d5a-3b1e2f4a5c6d created"}


def add_session_calls(operation: dict[str, Any]) -> None:
    """Add the calls that open or close a session, and their responses, to an inference operation."""
    response = operation["responses"]["200"]
    response["headers"] = {**response["headers"], **_SESSION_HEADERS}
    _add_body(operation["requestBody"]["content"], "SessionCall", {"requestType": "NEW_SESSION"})
    _add_body(response["content"], "SessionAnswer", _SESSION_EXAMPLE)


def _add_body(content: dict[str, Any], name: str, example: Any) -> None:
    media = content.setdefault("application/json", {"schema": {"anyOf": []}, "examples": {}})
    shape = media["schema"]
    media["schema"] = {"anyOf": [*shape.get("anyOf", [shape]), ref(name)]}
    media["examples"]["Session"] = {"value": example}


_DESCRIPTION = (
    "All routes of this server. An error before the first token sets the HTTP status. A later error ends the "
    "stream. The header x-lmi-ignored-parameters lists the parameters that the server ignored."
)
_HEADERS: Shape = {
    "x-request-id": {
        "description": "The request's id, which the client may choose by sending this header",
        "schema": TEXT,
    },
    "x-lmi-ignored-parameters": {"description": "The ignored parameters of the request", "schema": TEXT},
}
_LOCKED = {"description": "The API key is missing or wrong", "headers": {"www-authenticate": {"schema": TEXT}}}


DESCRIPTIONS: Mapping[str, Description] = {name: dialect.description for name, dialect in dialects().items()}
"""Maps the name of a dialect to its description."""


class DocumentedRoute(NamedTuple):
    """A route of the OpenAPI document.

    Attributes:
        dialect: the dialect of the bodies, or None if the route is not for inference.
        takes_calls: whether the route also accepts calls that open or close a session.
    """

    path: str
    methods: Sequence[str]
    dialect: Dialect | None = None
    takes_calls: bool = False


def document(
    routes: Iterable[DocumentedRoute], context: ServerContext, *, locked: bool, has_sessions: bool = False
) -> dict[str, Any]:
    """Build the OpenAPI document.

    Args:
        context: the server context, which lists the fields that the engine does not support.
        locked: whether all operations need an API key, except those that are marked as open.
        has_sessions: whether stateful sessions are enabled.
    """
    paths = _paths(routes, locked=locked, has_sessions=has_sessions)
    used = {tag for item in paths.values() for name, op in item.items() if name != "parameters" for tag in op["tags"]}
    result: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "lmi-handler", "version": __version__, "description": _DESCRIPTION},
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": description} for name, description in GROUPS.items() if name in used],
        "paths": paths,
        "components": {"schemas": {**components(context), **(SESSION_COMPONENTS if has_sessions else {})}},
    }
    if locked:
        result["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        result["security"] = [{"key": []}, {"x-api-key": []}]
    return result


def _paths(routes: Iterable[DocumentedRoute], *, locked: bool, has_sessions: bool) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for route in routes:
        for method in route.methods:
            operation = _operation(route, method, locked)
            if has_sessions and route.dialect is not None and method == "POST":
                operation["parameters"] = [dict(SESSION_PARAMETER)]
                if route.takes_calls:
                    add_session_calls(operation)
            paths.setdefault(route.path, _path_item(route.path))[method.lower()] = operation
    return paths


def components(context: ServerContext) -> dict[str, Shape]:
    """Return the schemas of all requests and responses by name."""
    types = [
        *(
            kind
            for entry in DESCRIPTIONS.values()
            for kind in (entry.response, entry.chunk, entry.error, entry.failure)
        ),
        *(kind for operation in OPERATIONS.values() for _, kind, _ in operation.responses.values()),
        FrontEndError,
    ]
    requests = {entry.request: entry.request_shape(context) for entry in DESCRIPTIONS.values()}
    return dict(sorted({**requests, **components_of(types)}.items()))


def _path_item(path: str) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": TEXT, "description": PATH_PARAMETERS.get(name, name)}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    return {"parameters": parameters} if parameters else {}


def _operation(route: DocumentedRoute, method: str, locked: bool) -> dict[str, Any]:
    name = re.sub(r"\W+", "_", route.path.strip("/")) or "root"
    shared: dict[str, Any] = {"operationId": f"{method.lower()}_{name.strip('_')}"}
    described = OPERATIONS.get((method, route.path))
    if described is not None:
        operation = _other(described)
    elif route.dialect is not None and method == "POST":
        operation = _inference(route.path, dialects_of(route.dialect))
    else:
        operation = {"summary": route.path, "tags": ["State"], "responses": {"200": {"description": "Success"}}}
    if locked and described is not None and described.open:
        shared["security"] = []
    elif locked:
        operation["responses"]["401"] = _LOCKED
    return {**shared, **operation}


def _streams(descriptions: Sequence[Description]) -> dict[str, Any]:
    """Map the content type of each stream to the schema of a value in the stream."""
    content = {}
    for kind in dict.fromkeys(kind for entry in descriptions for kind in entry.streams):
        values = [(entry.chunk, entry.failure or entry.error) for entry in descriptions if kind in entry.streams]
        content[kind] = {"schema": _any_of(_shapes(chain(*values)))}
    return content


def _inference(path: str, dialects: Sequence[Dialect]) -> dict[str, Any]:
    """Describe a route that accepts the bodies of these dialects."""
    described = [dialect.description for dialect in dialects]
    content = _streams(described)
    if whole := [dialect for dialect in dialects if dialect.description.response]:
        content["application/json"] = {
            "schema": _any_of(_shapes(dialect.description.response for dialect in whole)),
            "examples": {dialect.description.title: {"value": example_response(dialect)} for dialect in whole},
        }
    if any(entry.texts for entry in described):
        content["text/plain"] = {"schema": {"type": "string"}}
    forms = [dialect.description.form or ref(dialect.description.request) for dialect in dialects if dialect.forms]
    titles = ", ".join(entry.title for entry in described)
    group, summary = INFERENCE.get(path, (next(iter(GROUPS)), "Generate a response"))
    return {
        "tags": [group],
        "summary": summary,
        "description": f"Request formats: {titles}.",
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": _any_of([ref(entry.request) for entry in described]),
                    "examples": {entry.title: {"value": entry.example} for entry in described},
                },
                **({"multipart/form-data": {"schema": _any_of(forms)}} if forms else {}),
            },
        },
        "responses": {
            "200": {
                "description": "The response. For a stream, the schema describes one value of the stream",
                "headers": _HEADERS,
                "content": content,
            },
            "default": {
                "description": "The request was refused, or failed before the first token",
                "content": {
                    "application/json": {"schema": _any_of(_shapes(entry.error for entry in described))},
                    **_streams([entry for entry in described if entry.refuses_in_frame]),
                },
            },
        },
    }


def _shapes(kinds: Iterable[Any]) -> list[Shape]:
    """Return the schemas of the types. A union is split into its members."""
    shapes = [schema_of_type(kind) for kind in kinds]
    return [member for shape in shapes for member in shape.get("anyOf", [shape])]


def _any_of(shapes: Sequence[Shape]) -> Shape:
    distinct = [shape for index, shape in enumerate(shapes) if shape not in shapes[:index]]
    return distinct[0] if len(distinct) == 1 else {"anyOf": distinct} if distinct else {}


def _other(described: Operation) -> dict[str, Any]:
    operation: dict[str, Any] = {"tags": [described.tag], "summary": described.summary, "responses": {}}
    if described.query:
        operation["parameters"] = [
            {"name": name, "in": "query", "schema": shape} for name, shape in described.query.items()
        ]
    if described.body is not None:
        operation["requestBody"] = {"content": {"application/json": {"schema": described.body}}}
    if described.form is not None:
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": described.form}}}
    for status, (content_type, kind, example) in described.responses.items():
        operation["responses"][str(status)] = {
            "description": "Success" if status < 300 else "Failure",
            "content": {content_type: {"schema": schema_of_type(kind), "example": example}},
        }
    return operation
