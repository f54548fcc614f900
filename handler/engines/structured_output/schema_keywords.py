"""Keywords of a JSON schema that xgrammar leaves out of its grammar without a word, so that a client can be told.

xgrammar takes each subschema by one keyword: the first of `$ref`, `const`, `enum`, `anyOf`, `oneOf` and `allOf` that it
has, else its `type`. What stands beside the former is lost, and so are some of the combinations that belong to a type.
Found by experiment (`tests/unit/engines/schema_cases.py`). Names that are no keywords, and those that
only describe, pass, as the standard has it; `oneOf` passes though its branches may overlap. Answers may be narrower
than the schema: without properties that it does not name, for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class XgrammarSupport(NamedTuple):
    """What one xgrammar does, and another does not.

    Attributes:
        bounds: it knows the numbers between `minimum` and `maximum`.
        others: it tells properties that have a name from all the others.
    """

    bounds: bool
    others: bool


_HEADS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_NEVER = ("not", "if", "$dynamicRef", "$recursiveRef")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LENGTHS = ("minLength", "maxLength")
_NUMBERS = (*_BOUNDS, "multipleOf")

_OF_TYPE: Mapping[str, Sequence[str]] = {
    "string": (*_LENGTHS, "pattern", "format"),
    "number": _NUMBERS,
    "integer": _NUMBERS,
    "array": ("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems", "contains"),
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "unevaluatedProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
    ),
}
"""What limits values of a type; it has no effect on others."""

_LIMITING = frozenset(("type", *_HEADS, *_NEVER, *(name for names in _OF_TYPE.values() for name in names)))

_FORMATS = frozenset(
    (
        "date",
        "time",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uri",
        "uri-reference",
        "uri-template",
        "uuid",
        "json-pointer",
        "relative-json-pointer",
    )
)

_SHOWN = 150  # characters of a path


class _Place(NamedTuple):
    schema: Any
    path: tuple[str, ...] = ()
    default: str | None = None  # the type where none stands
    rebased: bool = False  # references in it are to another document


def dropped(schema: Any, follows: XgrammarSupport) -> str | None:
    """The first keyword of a decoded schema that xgrammar would leave out, by its path; None where there is none."""
    places, seen = [_Place(schema)], set[int]()
    while places:
        place = places.pop()
        if not isinstance(place.schema, dict) or id(place.schema) in seen:
            continue
        seen.add(id(place.schema))
        found = _lost(place, schema, follows)
        if found is not None:
            path = ".".join((*place.path, found))
            return path if len(path) <= _SHOWN else f"...{path[-_SHOWN:]}"
        places += reversed(list(_below(place, schema)))
    return None


def _below(place: _Place, root: Any) -> Iterator[_Place]:
    """The subschemas that xgrammar goes on to."""
    said, path = place.schema, place.path
    rebased = place.rebased or bool(path and "$id" in said)
    if isinstance(reference := said.get("$ref"), str):
        yield _Place(_target(reference, root), tuple(reference.split("/")[1:]))
    for name in ("properties", "patternProperties"):
        if isinstance(said.get(name), dict):
            yield from (_Place(below, (*path, name, key), None, rebased) for key, below in said[name].items())
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(said.get(name), list):
            yield from (_Place(below, (*path, name, str(n)), None, rebased) for n, below in enumerate(said[name]))
    for name in ("items", "unevaluatedItems", "additionalProperties", "unevaluatedProperties", "propertyNames"):
        yield _Place(said.get(name), (*path, name), "string" if name == "propertyNames" else None, rebased)


def _lost(place: _Place, root: Any, follows: XgrammarSupport) -> str | None:
    """A keyword of this very subschema, and what makes it one that is lost."""
    said = {name: value for name, value in place.schema.items() if name in _LIMITING and not _idle(name, value)}
    for name in _NEVER:
        if name in said:
            return name
    for head in _HEADS:
        if head in said:
            return _lost_beside(head, said, root) or _lost_of(head, said[head], place)
    types = said.pop("type", place.default or _implied(said))
    if types is None:
        return next((f"{name} without type" for name in said), None)
    if types == []:
        return "type"
    for kind in _names(types):
        own = {name: value for name, value in said.items() if name in _OF_TYPE.get(kind, ())}
        found = _LOST[kind](own, follows) if own else None
        if found is not None:
            return found
    return None


def _idle(name: str, value: Any) -> bool:
    """It allows everything, and xgrammar has nothing to follow."""
    if name in ("required", "patternProperties", "dependentRequired", "dependentSchemas", "dependencies"):
        return value in ([], {})
    return (name == "uniqueItems" and value is False) or (name == "propertyNames" and value in (True, {}))


def _implied(said: Mapping[str, Any]) -> str | None:
    """What xgrammar takes a subschema without a type for, which is narrower."""
    if any(name in said for name in ("properties", "additionalProperties", "unevaluatedProperties")):
        return "object"
    return "array" if any(name in said for name in ("items", "prefixItems", "unevaluatedItems")) else None


# -- one keyword, of which others may stand beside --------------------------------------------------------------------


def _lost_beside(head: str, said: Mapping[str, Any], root: Any) -> str | None:
    for name in said:
        if name != head and not (name == "type" and _has_types(said[head], head, said["type"], root)):
            return f"{name} beside {head}"
    return None


def _lost_of(head: str, value: Any, place: _Place) -> str | None:
    if head == "$ref":
        rebased = place.rebased or (place.path and "$id" in place.schema)
        return None if _is_plain(value) and not rebased else "$ref"
    if isinstance(value, list) and (not value or (head == "allOf" and len(value) > 1)):
        return head
    return None


def _is_plain(reference: Any) -> bool:
    """xgrammar looks up names as they stand, and takes what is no path in this document for anything."""
    if not isinstance(reference, str) or any(mark in reference for mark in "~%"):
        return False
    start, *names = reference.split("/")
    return start == "#" and all(names)


def _target(reference: str, root: Any) -> Any:
    """What a plain reference leads to; None where that is nothing, which xgrammar refuses."""
    found = root
    for name in reference.split("/")[1:]:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _has_types(value: Any, head: str, types: Any, root: Any) -> bool:
    """A `type` beside a keyword has no effect, as whatever that allows is of such a type."""
    allowed, found = _names(types), _types({head: value}, root)
    return found is not None and all(kind in allowed or (kind == "integer" and "number" in allowed) for kind in found)


def _names(value: Any) -> list[str]:
    """One or several; none where xgrammar will refuse what is there."""
    several = value if isinstance(value, list) else [value]
    return several if all(isinstance(name, str) for name in several) else []


def _types(schema: Any, root: Any) -> set[str] | None:
    """The types of what a subschema allows, as far as they are easily told."""
    found, places, seen = set[str](), [schema], set[int]()
    while places:
        said = places.pop()
        if not isinstance(said, dict):
            return None
        if id(said) in seen:  # it has been counted
            continue
        seen.add(id(said))
        branches = next((said[name] for name in ("anyOf", "oneOf", "allOf") if isinstance(said.get(name), list)), None)
        if isinstance(reference := said.get("$ref"), str):
            places.append(_target(reference, root))
        elif "const" in said:
            found.add(_type_of(said["const"]))
        elif isinstance(values := said.get("enum"), list):
            found |= set(map(_type_of, values))
        elif branches is not None:
            places += branches
        elif names := _names(said.get("type", _implied(said))):
            found |= set(names)
        else:
            return None
    return found


def _type_of(value: Any) -> str:
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    known = {bool: "boolean", int: "integer", str: "string", type(None): "null", list: "array", dict: "object"}
    return known[type(value)]


# -- what belongs to a type -------------------------------------------------------------------------------------------


def _lost_of_string(said: Mapping[str, Any], _: XgrammarSupport) -> str | None:
    """xgrammar takes the format, else the pattern, else the lengths."""
    if isinstance(said.get("format"), str) and said["format"] not in _FORMATS:
        return "format"
    first = next((name for name in ("format", "pattern") if name in said), None)
    return next((f"{name} beside {first}" for name in said if first and name != first), None)


def _lost_of_number(said: Mapping[str, Any], follows: XgrammarSupport) -> str | None:
    return next((name for name in said if name == "multipleOf" or not follows.bounds), None)


def _lost_of_array(said: Mapping[str, Any], _: XgrammarSupport) -> str | None:
    return next((name for name in ("uniqueItems", "contains") if name in said), None)


def _lost_of_object(said: Mapping[str, Any], follows: XgrammarSupport) -> str | None:
    for name in ("dependentRequired", "dependentSchemas", "dependencies"):
        if name in said:
            return name
    named, required = said.get("properties", {}), said.get("required", [])
    if isinstance(named, dict) and isinstance(required, list) and any(name not in named for name in _names(required)):
        return "required of what is not in properties"
    return _lost_of_patterns(said) or _lost_of_names(said, follows) or _lost_of_others(said, follows)


def _lost_of_patterns(said: Mapping[str, Any]) -> str | None:
    """Where a property may have to be what two subschemas say, xgrammar goes by one."""
    if "patternProperties" not in said:
        return None
    if said.get("properties"):
        return "patternProperties beside properties"
    several = isinstance(said["patternProperties"], dict) and len(said["patternProperties"]) > 1
    return "patternProperties of several patterns" if several else None


def _lost_of_names(said: Mapping[str, Any], follows: XgrammarSupport) -> str | None:
    if "propertyNames" not in said:
        return None
    for name in ("properties", "patternProperties"):
        if said.get(name):
            return f"propertyNames beside {name}"
    others = next((name for name in _OTHERS if name in said), None)
    if others and (said[others] is False or not (follows.others or said[others] in (True, {}))):
        return f"{others} beside propertyNames"
    return None


def _lost_of_others(said: Mapping[str, Any], follows: XgrammarSupport) -> str | None:
    others = next((name for name in _OTHERS if name in said), None)
    is_open = others is not None and said[others] is not False
    if is_open and said.get("properties") and not follows.others:
        return f"{others} beside properties"
    if is_open or "patternProperties" in said or "propertyNames" in said:
        least = said.get("minProperties", 0)
        if isinstance(least, int) and least > 1:  # a name may come twice, and is one property then
            return "minProperties beside names that are free"
    return None


_OTHERS = ("additionalProperties", "unevaluatedProperties")

_LOST: Mapping[str, Callable[[Mapping[str, Any], XgrammarSupport], str | None]] = {
    "string": _lost_of_string,
    "number": _lost_of_number,
    "integer": _lost_of_number,
    "array": _lost_of_array,
    "object": _lost_of_object,
}
