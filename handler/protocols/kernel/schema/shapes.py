"""The pieces of JSON Schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Shape = dict[str, Any]

TEXT: Shape = {"type": "string"}
FLAG: Shape = {"type": "boolean"}
COUNT: Shape = {"type": "integer", "minimum": 0}
NUMBER: Shape = {"type": "number"}
NULL: Shape = {"type": "null"}


def ref(name: str) -> Shape:
    return {"$ref": f"#/components/schemas/{name}"}


def record(required: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None, **more: Any) -> Shape:
    """Describe an object; names that it does not list are allowed."""
    properties = {**required, **(optional or {})}
    shape: Shape = {"type": "object", "properties": properties, **more}
    return {**shape, "required": [*required]} if required else shape


def listing(items: Shape, **more: Any) -> Shape:
    return {"type": "array", "items": items, **more}


def nullable(shape: Shape) -> Shape:
    """Allow null too."""
    if "anyOf" in shape:
        return {**shape, "anyOf": [*shape["anyOf"], NULL]}
    kind = shape.get("type")
    if isinstance(kind, list) and "null" in kind:
        return shape
    if isinstance(kind, str) and "enum" not in shape:
        if kind == "null":
            return shape
        return {**shape, "type": [kind, "null"]}
    description = {"description": shape["description"]} if "description" in shape else {}
    return {"anyOf": [{name: value for name, value in shape.items() if name != "description"}, NULL], **description}
