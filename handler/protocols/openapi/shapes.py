"""The small pieces that JSON schemas are made of, and parameters' schemas from the dialects' own tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from handler.protocols.base import ServerContext
from handler.protocols.parameters import MAX_TOP_TOKENS, REQUEST_FIELDS, Parameter
from handler.protocols.readers import structured_output
from handler.protocols.readers.adapters import named_adapter
from handler.protocols.readers.values import taken

Shape = dict[str, Any]

TEXT: Shape = {"type": "string"}
FLAG: Shape = {"type": "boolean"}
COUNT: Shape = {"type": "integer", "minimum": 0}
NUMBER: Shape = {"type": "number"}
NULL: Shape = {"type": "null"}


def ref(name: str) -> Shape:
    return {"$ref": f"#/components/schemas/{name}"}


def record(required: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None, **more: Any) -> Shape:
    """An object; names that it does not list are allowed."""
    properties = {**required, **(optional or {})}
    found: Shape = {"type": "object", "properties": properties, **more}
    return {**found, "required": [*required]} if required else found


def listing(items: Shape, **more: Any) -> Shape:
    return {"type": "array", "items": items, **more}


def nullable(shape: Shape) -> Shape:
    """The same, or null."""
    if "anyOf" in shape:
        return {**shape, "anyOf": [*shape["anyOf"], NULL]}
    if isinstance(kind := shape.get("type"), str) and "enum" not in shape:
        return {**shape, "type": [kind, "null"]}
    described = {"description": shape["description"]} if "description" in shape else {}
    return {"anyOf": [{name: value for name, value in shape.items() if name != "description"}, NULL], **described}


_GUIDES: dict[Callable[..., Any], Shape] = {
    structured_output.json_schema: {
        "anyOf": [{"type": "object"}, TEXT],
        "description": "A JSON schema, or the text of one",
    },
    structured_output.json_object: {**FLAG, "description": "Any JSON object"},
    structured_output.regex: {**TEXT, "description": "A regular expression"},
    structured_output.choice: listing(
        {"type": "string", "minLength": 1}, minItems=1, maxItems=structured_output.MAX_CHOICES
    ),
    structured_output.grammar: {**TEXT, "description": "A grammar in EBNF"},
    structured_output.tgi_grammar: record(
        {"type": {"enum": ["json", "json_object", "json_schema", "regex"]}}, {"value": {}}
    ),
    structured_output.response_format: record(
        {"type": {"enum": ["text", "json_object", "json_schema"]}}, {"json_schema": {"type": "object"}}
    ),
    named_adapter: {**TEXT, "description": "The name of a LoRA adapter"},
}
"""What readers take that are not written beside a table."""

_FIELDS: dict[str, Shape] = {"top_logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_TOP_TOKENS}}
"""What readers take that nobody has described, by the Sampling field that they set."""


def taken_by(found: Parameter) -> Shape:
    """Empty where nothing says it."""
    return taken(found.read) or _GUIDES.get(found.read) or _FIELDS.get(found.field) or {}


def parameter(found: Parameter, context: ServerContext) -> Shape:
    """What one takes; null means absent. What the engine lacks is said with it."""
    shape = dict(taken_by(found))
    if why := context.unsupported.get(found.field):
        shape["description"] = f"Refused: the engine {context.engine} lacks it: {why}"
    return nullable(shape) if shape else shape


def parameters(table: Mapping[str, Parameter], context: ServerContext) -> dict[str, Shape]:
    return {name: parameter(found, context) for name, found in table.items()}


def request_fields() -> dict[str, Shape]:
    return {name: nullable(taken(read) or {}) for name, read in REQUEST_FIELDS.items()}
