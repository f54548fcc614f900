"""docs/specification.md and `lmi deploy schema`: the specification's fields, out of its own JSON schema."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
import yaml

from deploy.cli.main import main
from deploy.spec.fields import fields
from deploy.spec.reading import schema
from tests.docs.pages import section

DOCUMENT = Path(__file__).parents[3] / "docs" / "specification.md"


def test_the_document_lists_every_section_and_no_other_field() -> None:
    items = re.findall(r"^\* (`[^:]+): (.*)", section(DOCUMENT.read_text(encoding="utf-8"), "Settings"), re.MULTILINE)
    assert re.findall(r"`(\w+)`", "".join(names for names, _ in items)) == [
        name for name, _ in fields() if "." not in name
    ]
    named = {name for _, text in items for name in re.findall(r"`(\w+\.[\w.]+)`", text)}
    assert len(named) > 10
    assert named <= {name for name, _ in fields()}


def test_the_shipped_schema_is_the_specifications() -> None:
    shipped = files("deploy.data").joinpath("spec.schema.json").read_text(encoding="utf-8")
    assert json.loads(shipped) == schema(), "lmi deploy schema > deploy/data/spec.schema.json"


def test_every_field_is_described() -> None:
    assert len(fields()) > 80
    assert [name for name, meaning in fields() if not meaning] == []


def test_the_schema_command_says_what_a_field_means(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "batch", "instance.count"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in told[:3]] == ["batch", "batch.input", "batch.output"]
    assert told[-1] == "instance.count: Initial number of instances (1 to 1000; default 1)."
    assert main(["schema", "adapters.name"]) == 0
    assert (
        capsys.readouterr().out
        == "components[].adapters[].name: Name that requests use for the component (required).\n"
    )
    assert main(["schema", "instance.numbers"]) == 2
    assert capsys.readouterr().err == "lmi deploy: instance.numbers: the specification has no such section or field\n"


def test_the_schema_takes_the_documents_example_and_refuses_a_wrong_one() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    example = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    check = jsonschema.Draft202012Validator(schema())
    assert list(check.iter_errors(example)) == []
    example["instance"] = {"count": 0, "typ": "ml.g5.xlarge"}
    assert sorted(error.validator for error in check.iter_errors(example)) == ["additionalProperties", "minimum"]
