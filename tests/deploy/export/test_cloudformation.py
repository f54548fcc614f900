from __future__ import annotations

import json
from typing import Any

import boto3
import pytest
from cfnlint.api import lint
from cfnlint.config import ManualArgs

from deploy.build import resources
from deploy.export.cloudformation import template
from tests.deploy.aws import Cloud
from tests.deploy.cases import settled, spec


def exported(case: str, **changes: Any) -> dict[str, Any]:
    return template(resources(spec(case, **changes), settled(case)))


@pytest.mark.parametrize(
    "case", ["plain", "components", "asynchronous", "isolated", "isolated-components", "prefix-aware"]
)
def test_awss_own_linter_finds_nothing(case: str) -> None:
    assert not lint(json.dumps(exported(case)), config=ManualArgs(regions=["eu-west-1"]))


def test_the_linter_would_find_a_wrong_name() -> None:
    wrong = exported("plain")
    wrong["Resources"]["EndpointConfig"]["Properties"]["ProductionVariants"][0]["InstanceKind"] = "ml.g5.xlarge"
    assert [match.rule.id for match in lint(json.dumps(wrong), config=ManualArgs(regions=["eu-west-1"]))] == ["E3002"]


def test_names_within_are_the_same_in_every_version() -> None:
    before, after = exported("components"), exported("components", options={"dtype": "fp16"})
    assert list(before["Resources"]) == list(after["Resources"])
    assert set(before["Resources"]) >= {"Model", "EndpointConfig", "Endpoint", "InferenceComponentLlamaChat"}
    names = [one["Resources"]["Model"]["Properties"]["ModelName"] for one in (before, after)]
    assert names[0] != names[1]


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
