"""docs/specification.md: its table, out of the specification's own JSON schema.

`python -m tests.deploy.unit.spec.document` writes it anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.spec.reading import schema
from tests.docs.pages import fill, table

DOCUMENT = Path(__file__).parents[4] / "docs" / "specification.md"


def rows() -> list[tuple[str, ...]]:
    """One of each field: its dotted name, what it takes, its default, what it means."""
    whole = schema()
    return [
        (f"`{name}`", _takes(field, whole), "required" if required else _default(field), _meaning(field, whole))
        for name, field, required in _fields(whole, whole, "")
    ]


def render() -> str:
    return fill(DOCUMENT.read_text(encoding="utf-8"), "fields", table(("name", "takes", "default", ""), rows()))


def names() -> list[str]:
    """The dotted names of all fields."""
    whole = schema()
    return [name for name, *_ in _fields(whole, whole, "")]


def _fields(
    section: dict[str, Any], whole: dict[str, Any], prefix: str, seen: set[str] | None = None
) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Every field; those of a section that stands in several places are listed in the first."""
    seen = set() if seen is None else seen
    for name, field in section["properties"].items():
        yield f"{prefix}{name}", field, name in section.get("required", ())
        for one in _branches(field):
            many = "[]" if one.get("type") == "array" else ""
            item = one.get("items", one)
            below = _resolved(item, whole)
            if "properties" in below and item["$ref"] not in seen:
                seen.add(item["$ref"])
                yield from _fields(below, whole, f"{prefix}{name}{many}.", seen)


def _branches(field: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for key in ("anyOf", "oneOf") for one in field.get(key, ())] or [field]


def _resolved(one: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    return dict(whole["$defs"][one["$ref"].rpartition("/")[2]]) if "$ref" in one else one


def _takes(field: dict[str, Any], whole: dict[str, Any]) -> str:
    return " or ".join(_kind(one, whole) for one in _branches(field) if one.get("type") != "null")


def _kind(one: dict[str, Any], whole: dict[str, Any]) -> str:
    if "properties" in _resolved(one, whole):
        return "mapping"
    if "enum" in one:
        return ", ".join(f"`{value}`" for value in one["enum"])
    kinds = {"string": "text", "integer": "number", "number": "number", "boolean": "true or false"}
    match one["type"]:
        case "array":
            return f"list of {_kind(one['items'], whole)}s"
        case "object":
            return "mapping of names to values"
        case "integer" | "number" if bounds := _bounds(one):
            return bounds
        case kind:
            return kinds[kind]


def _meaning(field: dict[str, Any], whole: dict[str, Any]) -> str:
    """pydantic leaves out a description that the section has itself."""
    return str(field.get("description") or _resolved(field, whole)["description"])


def _bounds(one: dict[str, Any]) -> str:
    least, most = one.get("minimum"), one.get("maximum")
    if most is not None:
        return f"{least:g} to {most:g}"
    if least is not None:
        return f"number from {least:g}"
    return "number above 0" if "exclusiveMinimum" in one else ""


def _default(field: dict[str, Any]) -> str:
    value = field.get("default")
    return "" if value in (None, [], {}) or isinstance(value, dict) else f"`{json.dumps(value)}`".replace('"', "")


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
