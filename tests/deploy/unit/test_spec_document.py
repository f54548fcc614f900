"""docs/specification.md: its table, out of the specification's own JSON schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from deploy.spec.reading import schema
from tests.docs.pages import fill, table

# -- docs/specification.md: its table, out of the specification's own JSON schema --------------------------------------
# `python -m tests.deploy.unit.test_spec_document` writes it anew.


DOCUMENT = Path(__file__).parents[3] / "docs" / "specification.md"
IN_ONE_ROW = "model.shape"
"""A section whose fields are rarely set: their names are in its row."""
NAMED_BY_FIELDS = (
    *("instance", "timeouts", "components", "components[].adapters", "scaling", "update"),
    *("network", "encryption", "async", "sagemaker", "batch"),
)
"""Sections without a row, as their fields' rows follow and say it."""


def rows() -> list[tuple[str, str]]:
    """One of each field: its dotted name; what it means, takes, and defaults to."""
    whole = schema()
    return [
        (f"`{name}`", _meaning(field, whole, _values(name, field, whole, required)))
        for name, field, required in _fields(whole, whole, "")
        if not name.startswith(f"{IN_ONE_ROW}.") and name not in NAMED_BY_FIELDS
    ]


def render() -> str:
    return fill(DOCUMENT.read_text(encoding="utf-8"), "fields", table(("name", "meaning and values"), rows()))


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


def _values(name: str, field: dict[str, Any], whole: dict[str, Any], required: bool) -> str:
    """Without those of texts and mappings, which the meaning says."""
    if name == IN_ONE_ROW:
        return ", ".join(
            f"`{below}`" for branch in _branches(field) for below in _resolved(branch, whole).get("properties", ())
        )
    kinds = [_kind(one, whole) for one in _branches(field)]
    return "; ".join(filter(None, [*kinds, "required" if required else _default(field)]))


def _kind(one: dict[str, Any], whole: dict[str, Any]) -> str:
    if "properties" in _resolved(one, whole):
        return ""
    if "enum" in one:
        return ", ".join(f"`{value}`" for value in one["enum"])
    match one["type"]:
        case "array" if "properties" not in _resolved(one["items"], whole):
            return "a list"
        case "integer" | "number":
            return _bounds(one)
        case _:
            return ""


def _meaning(field: dict[str, Any], whole: dict[str, Any], values: str) -> str:
    """pydantic leaves out a description that the section has itself."""
    description = str(field.get("description") or _resolved(field, whole)["description"])
    return f"{description.removesuffix('.')} ({values})." if values else description


def _bounds(one: dict[str, Any]) -> str:
    """Return what numbers it takes; empty where any of at least 0 or 1 will do."""
    least, most = one.get("minimum", 0), one.get("maximum")
    if most is not None:
        return f"{least:g} to {most:g}"
    return f"from {least:g}" if least not in (0, 1) else ""


def _default(field: dict[str, Any]) -> str:
    value = field.get("default")
    if value in (None, []) or isinstance(value, dict):
        return ""
    return f"default `{json.dumps(value)}`".replace('"', "")


# -- docs/specification.md and the shipped schema say what the specification is ----------------------------------------


def test_the_document_lists_every_field() -> None:
    written = DOCUMENT.read_text(encoding="utf-8")
    assert written == render(), "write it anew: python -m tests.deploy.unit.test_spec_document"


def test_the_shipped_schema_is_the_specifications() -> None:
    shipped = files("deploy.data").joinpath("spec.schema.json").read_text(encoding="utf-8")
    assert json.loads(shipped) == schema(), "lmi deploy schema > deploy/data/spec.schema.json"


def test_every_field_is_described() -> None:
    assert len(rows()) > 80
    assert [row for row in rows() if not row[-1]] == []


def test_the_schema_takes_the_documents_example_and_refuses_a_wrong_one() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    example = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    check = jsonschema.Draft202012Validator(schema())
    assert list(check.iter_errors(example)) == []
    example["instance"] = {"count": 0, "typ": "ml.g5.xlarge"}
    assert sorted(error.validator for error in check.iter_errors(example)) == ["additionalProperties", "minimum"]


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
