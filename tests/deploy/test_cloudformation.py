"""CloudFormation templates before AWS's own linter, which takes two seconds: `make test-deploy`, not `make test`."""

from __future__ import annotations

import json
from typing import Any

from cfnlint.api import lint
from cfnlint.config import ManualArgs

from tests.deploy.cases import CASES
from tests.deploy.unit.export.test_cloudformation import exported


def linted(template: dict[str, Any]) -> list[str]:
    matches = lint(json.dumps(template), config=ManualArgs(regions=["eu-west-1"], ignore_checks=["E3019"]))
    return [f"{match.rule.id}: {match.message}" for match in matches]


def test_awss_own_linter_finds_nothing_but_what_is_wrong() -> None:
    """All cases in one template, as the linter takes a second for each; so names stand there twice (E3019)."""
    every = exported("plain")
    every["Resources"], every["Outputs"] = {}, {}
    for number, case in enumerate(CASES):
        for name, resource in named_apart(exported(case)["Resources"], number).items():
            every["Resources"][name] = resource
    assert len(every["Resources"]) == sum(len(exported(case)["Resources"]) for case in CASES)
    every["Resources"]["EndpointConfigOf0"]["Properties"]["ProductionVariants"][0]["InstanceKind"] = "ml.g5.xlarge"
    (only,) = linted(every)
    assert only.startswith("E3002")
    assert "InstanceKind" in only


def named_apart(resources: dict[str, Any], number: int) -> dict[str, Any]:
    text = json.dumps(resources)
    for name in resources:
        text = text.replace(f'"{name}"', f'"{name}Of{number}"')
    found: dict[str, Any] = json.loads(text)
    return found
