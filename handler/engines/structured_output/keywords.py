"""Keywords of JSON schemas: which values they restrict, and which types of values a subschema allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from handler.core.json_pointer import target_of

HEADS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Keywords that replace all others of their subschema in grammars."""
NEVER = ("not", "if", "$dynamicRef", "$recursiveRef")
"""Keywords that no grammar enforces."""
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LENGTHS = ("minLength", "maxLength")
_NUMBERS = (*BOUNDS, "multipleOf")

OF_TYPE: Mapping[str, Sequence[str]] = {
    "string": (*_LENGTHS, "pattern", "format"),
    "number": _NUMBERS,
    "integer": _NUMBERS,
    "array": ("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems", "contains"),
    "object": (
        "properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
    ),
}  # fmt: skip
"""Maps each type to the keywords that restrict its values without affecting values of other types."""

LIMITING = frozenset(("type", *HEADS, *NEVER, *(name for names in OF_TYPE.values() for name in names)))
"""Keywords that restrict values. All others are annotations."""

_DATA = ("const", "enum", "default", "examples")
"""Keywords whose values are no schemas."""

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are schemas by names, which may be those of keywords."""

_MAX_LOOKUPS = 10_000  # subschemas and values per schema whose types are looked up


def is_idle(name: str, value: Any) -> bool:
    """Return whether a keyword with this value allows everything."""
    if name in ("required", "patternProperties", "dependentRequired", "dependentSchemas", "dependencies"):
        return value in ([], {})
    if name in ("minLength", "minItems", "minProperties"):
        return type(value) is int and value == 0
    return (name == "uniqueItems" and value is False) or (name == "propertyNames" and value in (True, {}))


def implied_type(schema: Mapping[str, Any]) -> str | None:
    """Return the type that servers assume for a subschema without `type`, or None if they do not assume any."""
    if any(name in schema for name in ("properties", "additionalProperties", "unevaluatedProperties")):
        return "object"
    return "array" if any(name in schema for name in ("items", "prefixItems", "unevaluatedItems")) else None


def mapped(schema: Any, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Any:
    """Return a schema in which `change` has replaced every object that may be a schema, the outer ones first.

    Raises:
        RecursionError: the schema is nested too deeply.
    """
    if isinstance(schema, list):
        return [mapped(item, change) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = dict(change(schema))
    for name, value in result.items():
        if name in _BY_NAME and isinstance(value, dict):
            result[name] = {key: mapped(below, change) for key, below in value.items()}
        elif name not in _DATA:
            result[name] = mapped(value, change)
    return result


def names_in(value: Any) -> list[str]:
    """Return the names in a string or list, or an empty list if the value is invalid. Servers refuse such a value."""
    names = value if isinstance(value, list) else [value]
    return names if all(isinstance(name, str) for name in names) else []


class Types:
    """Looks up the types that a schema's subschemas allow. `_MAX_LOOKUPS` limits the number of lookups."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_lookups = 0

    def are(self, value: Any, head: str, types: Any) -> bool:
        """Return whether `types` are redundant because the keyword `head` allows only values of these types."""
        allowed, actual = names_in(types), self._of({head: value})
        return actual is not None and all(
            kind in allowed or (kind == "integer" and "number" in allowed) for kind in actual
        )

    def _of(self, schema: Any) -> set[str] | None:
        """Return the types of a subschema's values, or None if they are not obvious."""
        types, places, seen = set[str](), [schema], set[int]()
        while places:
            schema = places.pop()
            self._num_lookups += 1
            if not isinstance(schema, dict) or self._num_lookups > _MAX_LOOKUPS:
                return None
            if id(schema) in seen:
                continue
            seen.add(id(schema))
            branches = next(
                (schema[name] for name in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(name), list)), None
            )
            if isinstance(reference := schema.get("$ref"), str):
                places += [target_of(reference, self._root)] if reference.startswith("#") else []
            elif "const" in schema:
                types.add(_type_of(schema["const"]))
            elif isinstance(values := schema.get("enum"), list):
                self._num_lookups += len(values)
                types |= set(map(_type_of, values))
            elif branches is not None:
                places += branches
            elif names := names_in(schema.get("type", implied_type(schema))):
                types |= set(names)
            else:
                return None
        return types


_JSON_TYPES = {bool: "boolean", int: "integer", str: "string", type(None): "null", list: "array", dict: "object"}


def _type_of(value: Any) -> str:
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    return _JSON_TYPES[type(value)]
