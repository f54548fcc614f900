"""docs/specification.md and the shipped schema say what the specification is."""

from __future__ import annotations

import json
from importlib.resources import files

import jsonschema
import yaml

from deploy.spec.reading import schema
from tests.deploy.unit.spec import document


def test_the_document_lists_every_field() -> None:
    written = document.DOCUMENT.read_text(encoding="utf-8")
    assert written == document.render(), "write it anew: python -m tests.deploy.unit.spec.document"


def test_the_shipped_schema_is_the_specifications() -> None:
    shipped = files("deploy.data").joinpath("spec.schema.json").read_text(encoding="utf-8")
    assert json.loads(shipped) == schema(), "lmi deploy schema > deploy/data/spec.schema.json"


def test_every_field_is_described() -> None:
    assert len(document.rows()) > 80
    assert [row for row in document.rows() if not row[-1]] == []


def test_the_schema_takes_the_documents_example_and_refuses_a_wrong_one() -> None:
    text = document.DOCUMENT.read_text(encoding="utf-8")
    example = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    check = jsonschema.Draft202012Validator(schema())
    assert list(check.iter_errors(example)) == []
    example["instance"] = {"count": 0, "typ": "ml.g5.xlarge"}
    assert sorted(error.validator for error in check.iter_errors(example)) == ["additionalProperties", "minimum"]
