"""Every request of every kind of deployment, exactly, and as botocore's own validation takes it.

A golden file that changes renews what people have deployed: CHANGELOG.md says so. `--update-golden` writes them anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.resources.build import resources
from deploy.resources.resource import Resource
from tests.deploy.cases import CASES, decision, spec
from tests.deploy.strict import OPERATIONS, input_of, plain, wrong_in, wrong_words
from tests.one_test import in_one_test

GOLDEN = Path(__file__).parents[3] / "golden" / "deploy"


@pytest.mark.parametrize("case", CASES)
def test_requests(case: str, request: pytest.FixtureRequest) -> None:
    found = [_as_json(resource) for resource in resources(spec(case), decision(case))]
    path = GOLDEN / f"{case}.json"
    if request.config.getoption("--update-golden"):
        path.write_text(json.dumps(found, indent=2) + "\n")
    assert found == json.loads(path.read_text())


def test_every_golden_file_has_its_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(CASES)


@in_one_test("case", CASES)
def test_aws_takes_every_request(case: str) -> None:
    """botocore's validation lets any text pass, of any length; its model says which AWS takes."""
    for resource in resources(spec(case), decision(case)):
        assert bool(resource.update) == (OPERATIONS[resource.kind][2] is not None), resource.key
        assert [*wrong_in(resource)] == []


def test_a_wrong_word_would_be_found() -> None:
    wrong = {"ModelName": "a_b", "PrimaryContainer": {"Mode": "Many", "Environment": {"A-B": "x"}}}
    found = list(wrong_words(input_of("sagemaker", "CreateModel"), wrong))
    assert [one.partition(":")[0] for one in found] == [
        ".ModelName",
        ".PrimaryContainer.Mode",
        ".PrimaryContainer.Environment",
    ]


@in_one_test("case", CASES)
def test_what_a_resource_needs_comes_before_it(case: str) -> None:
    made = resources(spec(case), decision(case))
    keys = [resource.key for resource in made]
    assert len(set(keys)) == len(keys)
    for place, resource in enumerate(made):
        assert set(resource.needs) <= set(keys[:place]), resource.key


def _as_json(resource: Resource) -> dict[str, Any]:
    return {
        "key": resource.key,
        "needs": list(resource.needs),
        "request": plain(resource.request),
        "update": plain(resource.update),
    }
