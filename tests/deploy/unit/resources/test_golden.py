"""Every request of every kind of deployment, exactly, and as botocore's own validation takes it.

A golden file that changes renews what people have deployed: CHANGELOG.md says so. `--update-golden` writes them anew.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.validate import ParamValidator

from deploy.resources.build import resources
from deploy.resources.resource import Kind, Resource, resolved
from tests.deploy.cases import CASES, decision, spec
from tests.one_test import in_one_test

GOLDEN = Path(__file__).parents[3] / "golden" / "deploy"

OPERATIONS = {
    Kind.MODEL: ("sagemaker", "CreateModel", None),
    Kind.ENDPOINT_CONFIG: ("sagemaker", "CreateEndpointConfig", None),
    Kind.ENDPOINT: ("sagemaker", "CreateEndpoint", "UpdateEndpoint"),
    Kind.COMPONENT: ("sagemaker", "CreateInferenceComponent", "UpdateInferenceComponent"),
    Kind.SCALABLE_TARGET: ("application-autoscaling", "RegisterScalableTarget", None),
    Kind.SCALING_POLICY: ("application-autoscaling", "PutScalingPolicy", None),
    Kind.ALARM: ("cloudwatch", "PutMetricAlarm", None),
}


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
def test_botocore_takes_every_request(case: str) -> None:
    for resource in resources(spec(case), decision(case)):
        service, create, update = OPERATIONS[resource.kind]
        _validate(service, create, resource.request)
        assert bool(resource.update) == (update is not None), resource.key
        if update:
            _validate(service, update, resource.update)


@in_one_test("case", CASES)
def test_every_word_and_name_is_one_that_aws_takes(case: str) -> None:
    """botocore's validation lets any text pass, of any length; its model says which AWS takes."""
    for resource in resources(spec(case), decision(case)):
        service, create, update = OPERATIONS[resource.kind]
        wrong = list(_wrong(_input(service, create), _plain(resource.request), resource.key))
        if update:
            wrong += _wrong(_input(service, update), _plain(resource.update), resource.key)
        assert not wrong


def test_a_wrong_word_would_be_found() -> None:
    wrong = {"ModelName": "a_b", "PrimaryContainer": {"Mode": "Many", "Environment": {"A-B": "x"}}}
    found = list(_wrong(_input("sagemaker", "CreateModel"), wrong))
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
        "request": _plain(resource.request),
        "update": _plain(resource.update),
    }


def _plain(value: Any) -> Any:
    return resolved(value, lambda ref: f"<{ref.attribute} of {ref.key}>")


@functools.cache
def _input(service: str, operation: str) -> Any:
    return botocore.session.get_session().get_service_model(service).operation_model(operation).input_shape


def _validate(service: str, operation: str, request: Any) -> None:
    report = ParamValidator().validate(_plain(request), _input(service, operation))
    assert not report.has_errors(), f"{operation}: {report.generate_report()}"


def _wrong(shape: Any, value: Any, place: str = "") -> Iterator[str]:
    """Texts and numbers within that the model of the API does not take."""
    if shape.type_name == "structure":
        for name, one in value.items():
            yield from _wrong(shape.members[name], one, f"{place}.{name}")
    elif shape.type_name == "list":
        for one in value:
            yield from _wrong(shape.member, one, place)
    elif shape.type_name == "map":
        for name, one in value.items():
            yield from _wrong(shape.key, name, place)
            yield from _wrong(shape.value, one, f"{place}.{name}")
    elif not _takes(shape, value):
        yield f"{place}: {value}"


def _takes(shape: Any, value: Any) -> bool:
    rules = shape.metadata
    size = len(value) if isinstance(value, str) else value
    if not rules.get("min", size) <= size <= rules.get("max", size):
        return False
    if not isinstance(value, str):
        return True
    pattern = rules.get("pattern", "")
    return (not shape.enum or value in shape.enum) and (
        not pattern or r"\p{" in pattern or r"\u" in pattern or bool(re.fullmatch(pattern, value, re.DOTALL))
    )
