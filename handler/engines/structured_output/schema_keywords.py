"""Finds the keywords of a JSON schema that xgrammar silently ignores, so that the schema can be refused.

xgrammar reads each subschema by one keyword: the first of `$ref`, `const`, `enum`, `anyOf`, `oneOf` and `allOf`, else
its `type`. It ignores keywords beside the former, and some combinations of those that belong to a type. The rules here
are measured (`tests/unit/engines/schema_cases.py`). Unknown names and annotations pass, as JSON Schema has it; `oneOf`
passes though its branches may overlap. An answer may be narrower than the schema, as without unnamed properties.
docs/decisions.md says why this file exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from handler.engines.structured_output.ebnf import cycles


class XgrammarSupport(NamedTuple):
    """Differences between versions of xgrammar.

    Attributes:
        bounds: it follows `minimum` and `maximum`.
        others: it distinguishes named properties from all others.
    """

    bounds: bool
    others: bool


_HEADS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_NEVER = ("not", "if", "$dynamicRef", "$recursiveRef")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LENGTHS = ("minLength", "maxLength")
_NUMBERS = (*_BOUNDS, "multipleOf")
_OTHERS = ("additionalProperties", "unevaluatedProperties")

_OF_TYPE: Mapping[str, Sequence[str]] = {
    "string": (*_LENGTHS, "pattern", "format"),
    "number": _NUMBERS,
    "integer": _NUMBERS,
    "array": ("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems", "contains"),
    "object": (
        "properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
    ),
}  # fmt: skip
"""Keywords that limit values of a type, and have no effect on other values."""

_LIMITING = frozenset(("type", *_HEADS, *_NEVER, *(name for names in _OF_TYPE.values() for name in names)))

_FORMATS = frozenset((
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uri-reference",
    "uri-template", "uuid", "json-pointer", "relative-json-pointer",
))  # fmt: skip

_MAX_PATH = 150  # characters
_MAX_LOOKUPS = 10_000  # subschemas and values in which types are looked up, of one schema


class _Place(NamedTuple):
    schema: Any
    path: tuple[str, ...] = ()
    default: str | None = None  # type of a subschema without one
    rebased: bool = False  # its references are to another document


def ignored(schema: Any, xgrammar: XgrammarSupport) -> str | None:
    """Return the path of the first keyword of a decoded schema that xgrammar ignores; None for none."""
    places, seen, types = [_Place(schema)], set[int](), _Types(schema)
    while places:
        place = places.pop()
        if not isinstance(place.schema, dict) or id(place.schema) in seen:
            continue
        seen.add(id(place.schema))
        keyword = _ignored(place, types, xgrammar)
        if keyword is not None:
            path = ".".join((*place.path, keyword))
            return path if len(path) <= _MAX_PATH else f"...{path[-_MAX_PATH:]}"
        places += reversed(list(_below(place, schema)))
    return None


def cyclic_reference(schema: Any) -> str | None:
    """Return a reference that leads back to itself with nothing else on the way; None for none."""
    edges: dict[str, set[str]] = {}
    waiting = ["#"]
    while waiting:
        reference = waiting.pop()
        if reference not in edges:
            edges[reference] = set(_alone(_target(reference, schema)))
            waiting += edges[reference]
    found = next(cycles(edges), ())
    return min(found) if found else None


def _alone(schema: Any) -> Iterator[str]:
    """Yield the references that may be all that a value follows."""
    waiting = [schema]
    while waiting:
        match waiting.pop():
            case {"$ref": str(reference)}:
                yield reference
            case {"anyOf": list(branches)} | {"oneOf": list(branches)} | {"allOf": list(branches)}:
                waiting += branches


def _below(place: _Place, root: Any) -> Iterator[_Place]:
    """Yield the subschemas that xgrammar reads."""
    schema, path = place.schema, place.path
    rebased = place.rebased or bool(path and "$id" in schema)
    if isinstance(reference := schema.get("$ref"), str):
        yield _Place(_target(reference, root), tuple(reference.split("/")[1:]))
    for name in ("properties", "patternProperties"):
        if isinstance(schema.get(name), dict):
            yield from (_Place(below, (*path, name, key), None, rebased) for key, below in schema[name].items())
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(schema.get(name), list):
            yield from (_Place(below, (*path, name, str(n)), None, rebased) for n, below in enumerate(schema[name]))
    for name in ("items", "unevaluatedItems", "additionalProperties", "unevaluatedProperties", "propertyNames"):
        yield _Place(schema.get(name), (*path, name), "string" if name == "propertyNames" else None, rebased)


def _ignored(place: _Place, known: _Types, xgrammar: XgrammarSupport) -> str | None:
    """Return an ignored keyword of this subschema, with the reason."""
    schema = {name: value for name, value in place.schema.items() if name in _LIMITING and not _idle(name, value)}
    for name in _NEVER:
        if name in schema:
            return name
    for head in _HEADS:
        if head in schema:
            return _ignored_beside(head, schema, known) or _ignored_of(head, schema[head], place)
    types = schema.pop("type", place.default or _implied(schema))
    if types is None:
        return next((f"{name} without type" for name in schema), None)
    if types == []:
        return "type"
    for kind in _names(types):
        own = {name: value for name, value in schema.items() if name in _OF_TYPE.get(kind, ())}
        keyword = _IGNORED[kind](own, xgrammar) if own else None
        if keyword is not None:
            return keyword
    return None


def _idle(name: str, value: Any) -> bool:
    """Return whether a keyword allows everything."""
    if name in ("required", "patternProperties", "dependentRequired", "dependentSchemas", "dependencies"):
        return value in ([], {})
    return (name == "uniqueItems" and value is False) or (name == "propertyNames" and value in (True, {}))


def _implied(schema: Mapping[str, Any]) -> str | None:
    """Return the type that xgrammar assumes without one, which is narrower."""
    if any(name in schema for name in ("properties", "additionalProperties", "unevaluatedProperties")):
        return "object"
    return "array" if any(name in schema for name in ("items", "prefixItems", "unevaluatedItems")) else None


# -- keywords beside a leading one -----------------------------------------------------------------------------------


def _ignored_beside(head: str, schema: Mapping[str, Any], known: _Types) -> str | None:
    for name in schema:
        if name != head and not (name == "type" and known.are(schema[head], head, schema["type"])):
            return f"{name} beside {head}"
    return None


def _ignored_of(head: str, value: Any, place: _Place) -> str | None:
    if head == "$ref":
        rebased = place.rebased or (place.path and "$id" in place.schema)
        return None if _is_plain(value) and not rebased else "$ref"
    if isinstance(value, list) and (not value or (head == "allOf" and len(value) > 1)):
        return head
    return None


def _is_plain(reference: Any) -> bool:
    """Return whether xgrammar can resolve a reference: it does not unescape names, and ignores other documents."""
    if not isinstance(reference, str) or any(mark in reference for mark in "~%"):
        return False
    start, *names = reference.split("/")
    return start == "#" and all(names)


def _target(reference: str, root: Any) -> Any:
    """Resolve a plain reference; None where it leads nowhere, which xgrammar refuses."""
    target = root
    for name in reference.split("/")[1:]:
        target = target.get(name) if isinstance(target, dict) else None
    return target


def _names(value: Any) -> list[str]:
    """Return one or several names; none for a value that xgrammar refuses."""
    names = value if isinstance(value, list) else [value]
    return names if all(isinstance(name, str) for name in names) else []


class _Types:
    """Looks up the types of subschemas' values; many subschemas may lead to the same ones."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_lookups = 0

    def are(self, value: Any, head: str, types: Any) -> bool:
        """Return whether a `type` beside a keyword has no effect, as all its values are of such a type."""
        allowed, actual = _names(types), self._of({head: value})
        return actual is not None and all(
            kind in allowed or (kind == "integer" and "number" in allowed) for kind in actual
        )

    def _of(self, schema: Any) -> set[str] | None:
        """Return the types of a subschema's values; None where they are not obvious."""
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
                places.append(_target(reference, self._root))
            elif "const" in schema:
                types.add(_type_of(schema["const"]))
            elif isinstance(values := schema.get("enum"), list):
                self._num_lookups += len(values)
                types |= set(map(_type_of, values))
            elif branches is not None:
                places += branches
            elif names := _names(schema.get("type", _implied(schema))):
                types |= set(names)
            else:
                return None
        return types


def _type_of(value: Any) -> str:
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    known = {bool: "boolean", int: "integer", str: "string", type(None): "null", list: "array", dict: "object"}
    return known[type(value)]


# -- keywords of a type -----------------------------------------------------------------------------------------------


def _ignored_of_string(schema: Mapping[str, Any], _: XgrammarSupport) -> str | None:
    """Find keywords beside the first of format, pattern and lengths, which is the one that xgrammar follows."""
    if isinstance(schema.get("format"), str) and schema["format"] not in _FORMATS:
        return "format"
    first = next((name for name in ("format", "pattern") if name in schema), None)
    return next((f"{name} beside {first}" for name in schema if first and name != first), None)


def _ignored_of_number(schema: Mapping[str, Any], xgrammar: XgrammarSupport) -> str | None:
    return next((name for name in schema if name == "multipleOf" or not xgrammar.bounds), None)


def _ignored_of_array(schema: Mapping[str, Any], _: XgrammarSupport) -> str | None:
    return next((name for name in ("uniqueItems", "contains") if name in schema), None)


def _ignored_of_object(schema: Mapping[str, Any], xgrammar: XgrammarSupport) -> str | None:
    for name in ("dependentRequired", "dependentSchemas", "dependencies"):
        if name in schema:
            return name
    named, required = schema.get("properties", {}), schema.get("required", [])
    if isinstance(named, dict) and isinstance(required, list) and any(name not in named for name in _names(required)):
        return "required of what is not in properties"
    return _ignored_of_patterns(schema) or _ignored_of_names(schema, xgrammar) or _ignored_of_others(schema, xgrammar)


def _ignored_of_patterns(schema: Mapping[str, Any]) -> str | None:
    """Find a pattern beside another subschema for the same property, of which xgrammar follows only one."""
    if "patternProperties" not in schema:
        return None
    if schema.get("properties"):
        return "patternProperties beside properties"
    several = isinstance(schema["patternProperties"], dict) and len(schema["patternProperties"]) > 1
    return "patternProperties of several patterns" if several else None


def _ignored_of_names(schema: Mapping[str, Any], xgrammar: XgrammarSupport) -> str | None:
    if "propertyNames" not in schema:
        return None
    for name in ("properties", "patternProperties"):
        if schema.get(name):
            return f"propertyNames beside {name}"
    others = next((name for name in _OTHERS if name in schema), None)
    if others and (schema[others] is False or not (xgrammar.others or schema[others] in (True, {}))):
        return f"{others} beside propertyNames"
    return None


def _ignored_of_others(schema: Mapping[str, Any], xgrammar: XgrammarSupport) -> str | None:
    others = next((name for name in _OTHERS if name in schema), None)
    is_open = others is not None and schema[others] is not False
    if is_open and schema.get("properties") and not xgrammar.others:
        return f"{others} beside properties"
    if is_open or "patternProperties" in schema or "propertyNames" in schema:
        least = schema.get("minProperties", 0)
        if isinstance(least, int) and least > 1:  # xgrammar counts a repeated name twice
            return "minProperties beside names that are free"
    return None


_IGNORED: Mapping[str, Callable[[Mapping[str, Any], XgrammarSupport], str | None]] = {
    "string": _ignored_of_string,
    "number": _ignored_of_number,
    "integer": _ignored_of_number,
    "array": _ignored_of_array,
    "object": _ignored_of_object,
}
