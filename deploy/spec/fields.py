"""Descriptions of fields for `lmi deploy schema NAME`, read from the specification's JSON schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from deploy.spec.reading import schema

_IN_ONE_ROW = "model.shape"
"""A section whose fields are rarely set. Its own row lists their names."""


def fields() -> list[tuple[str, str]]:
    """Return the dotted name of each field or section, and its meaning, values and default."""
    whole = schema()
    return [
        (name, _meaning(field, whole, _values(name, field, whole, required)))
        for name, field, required in _fields(whole, whole, "")
        if not name.startswith(f"{_IN_ONE_ROW}.")
    ]


def fields_of(name: str) -> list[tuple[str, str]]:
    """Return the fields whose dotted name has a part with this name: `scaling`, `model.id`, `ami`."""
    part = f".{name.replace('[]', '')}."
    return [row for row in fields() if part in f".{row[0].replace('[]', '')}."]


def _fields(
    section: dict[str, Any], whole: dict[str, Any], prefix: str, seen: set[str] | None = None
) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield each field. A section that several sections use is listed once."""
    seen = set() if seen is None else seen
    for name, field in section["properties"].items():
        yield f"{prefix}{name}", field, name in section.get("required", ())
        for branch in _branches(field):
            many = "[]" if branch.get("type") == "array" else ""
            item = branch.get("items", branch)
            below = _resolved(item, whole)
            if "properties" in below and item["$ref"] not in seen:
                seen.add(item["$ref"])
                yield from _fields(below, whole, f"{prefix}{name}{many}.", seen)


def _branches(field: dict[str, Any]) -> list[dict[str, Any]]:
    return [branch for key in ("anyOf", "oneOf") for branch in field.get(key, ())] or [field]


def _resolved(field: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    return dict(whole["$defs"][field["$ref"].rpartition("/")[2]]) if "$ref" in field else field


def _values(name: str, field: dict[str, Any], whole: dict[str, Any], required: bool) -> str:
    """Return the values that a field takes, without those of texts and mappings, which the meaning says."""
    if name == _IN_ONE_ROW:
        return ", ".join(
            below for branch in _branches(field) for below in _resolved(branch, whole).get("properties", ())
        )
    kinds = [_kind(branch, whole) for branch in _branches(field)]
    return "; ".join(filter(None, [*kinds, "required" if required else _default(field)]))


def _kind(field: dict[str, Any], whole: dict[str, Any]) -> str:
    if "properties" in _resolved(field, whole):
        return ""
    if "enum" in field:
        return ", ".join(str(value) for value in field["enum"])
    match field["type"]:
        case "array" if "properties" not in _resolved(field["items"], whole):
            return "a list"
        case "integer" | "number":
            return _bounds(field)
        case _:
            return ""


def _meaning(field: dict[str, Any], whole: dict[str, Any], values: str) -> str:
    """Return the description and the values. pydantic omits a description that the section has itself."""
    description = str(field.get("description") or _resolved(field, whole)["description"])
    return f"{description.removesuffix('.')} ({values})." if values else description


def _bounds(field: dict[str, Any]) -> str:
    """Return the numbers that a field takes; empty if any number of at least 0 or 1 is valid."""
    minimum, maximum = field.get("minimum", 0), field.get("maximum")
    if maximum is not None:
        return f"{minimum:g} to {maximum:g}"
    return f"from {minimum:g}" if minimum not in (0, 1) else ""


def _default(field: dict[str, Any]) -> str:
    value = field.get("default")
    if value in (None, []) or isinstance(value, dict):
        return ""
    return f"default {json.dumps(value)}".replace('"', "")
