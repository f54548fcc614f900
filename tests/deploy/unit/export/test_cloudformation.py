from __future__ import annotations

import json
from typing import Any

import boto3
from cfnlint.api import lint
from cfnlint.config import ManualArgs

from deploy.export.cloudformation import template
from deploy.resources.build import resources
from tests.deploy.cases import CASES, settled, spec
from tests.deploy.doubles.aws import Cloud


def exported(case: str, **changes: Any) -> dict[str, Any]:
    return template(resources(spec(case, **changes), settled(case)))


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


def test_names_within_are_the_same_in_every_version() -> None:
    before, after = exported("components"), exported("components", options={"dtype": "fp16"})
    assert list(before["Resources"]) == list(after["Resources"])
    assert set(before["Resources"]) >= {"Model", "EndpointConfig", "Endpoint", "InferenceComponentLlamaChat"}
    names = [one["Resources"]["Model"]["Properties"]["ModelName"] for one in (before, after)]
    assert names[0] != names[1]


def test_names_are_those_that_up_gives() -> None:
    """So that the other commands find what a stack has made."""
    made = resources(spec("components"), settled("components"))
    properties = [one["Properties"] for one in template(made)["Resources"].values()]
    for resource, given in zip(made, properties, strict=True):
        assert resource.name in given.values(), resource.key


def test_order_and_updates_are_said() -> None:
    found = exported("components")["Resources"]
    assert found["Endpoint"]["DependsOn"] == ["Alarm5xx", "AlarmModelErrors"]
    assert found["Endpoint"]["Properties"]["EndpointConfigName"] == {
        "Fn::GetAtt": ["EndpointConfig", "EndpointConfigName"]
    }
    assert found["Endpoint"]["Properties"]["RetainAllVariantProperties"] is True
    assert "BlueGreenUpdatePolicy" in found["Endpoint"]["Properties"]["DeploymentConfig"]
    assert "RollingUpdatePolicy" in found["InferenceComponentLlamaChat"]["Properties"]["DeploymentConfig"]
    alarm = found["AlarmLlamaChatNoCapacity"]
    assert alarm["Properties"]["AlarmActions"] == [{"Ref": "ScalingPolicyLlamaChatWake"}]
    assert "DependsOn" not in alarm
    assert found["ScalableTargetLlamaChat"]["Properties"]["Tags"][0]["Key"] == "lmi:deployment"


def test_a_stack_of_it_is_made(cloud: Cloud) -> None:
    """moto knows SageMaker's three, no alarms, and only instance types without a GPU."""
    said = spec("cpu", instance={"type": "ml.c5.2xlarge"}, alarms=None)
    stacks = boto3.client("cloudformation")
    body = json.dumps(template(resources(said, settled("cpu", instance_type="ml.c5.2xlarge"))))
    stacks.create_stack(StackName="smollm2", TemplateBody=body)
    stack = stacks.describe_stacks(StackName="smollm2")["Stacks"][0]
    assert stack["StackStatus"] == "CREATE_COMPLETE"
    assert stack["Outputs"][0]["OutputValue"].startswith("smollm2-Endpoint-")  # moto calls things otherwise
    made = {
        one["LogicalResourceId"] for one in stacks.list_stack_resources(StackName="smollm2")["StackResourceSummaries"]
    }
    assert made == {"Model", "EndpointConfig", "Endpoint"}
