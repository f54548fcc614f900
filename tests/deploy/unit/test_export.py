from __future__ import annotations

import json
import re
from typing import Any

import pytest

from deploy.errors import Refused
from deploy.export.cloudformation import cloudformation_template, terraform_configuration
from deploy.export.sdk import sdk_program
from deploy.resources.build import resources
from tests.deploy.cases import CASES, decision, spec
from tests.one_test import in_one_test


def exported(case: str, **changes: Any) -> dict[str, Any]:
    return cloudformation_template(resources(spec(case, **changes), decision(case)))


def test_names_within_are_the_same_in_every_version() -> None:
    before, after = exported("components"), exported("components", options={"dtype": "fp16"})
    assert list(before["Resources"]) == list(after["Resources"])
    assert set(before["Resources"]) >= {"Model", "EndpointConfig", "Endpoint", "InferenceComponentLlamaChat"}
    names = [one["Resources"]["Model"]["Properties"]["ModelName"] for one in (before, after)]
    assert names[0] != names[1]


def test_names_are_those_that_up_gives() -> None:
    """So that the other commands find what a stack has made."""
    made = resources(spec("components"), decision("components"))
    properties = [one["Properties"] for one in cloudformation_template(made)["Resources"].values()]
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


def terraform(case: str, **changes: Any) -> dict[str, Any]:
    return terraform_configuration(resources(spec(case, **changes), decision(case)), "eu-west-1")


def stack_of(configuration: dict[str, Any]) -> dict[str, Any]:
    (stack,) = configuration["resource"]["aws_cloudformation_stack"].values()
    return dict(stack)


@in_one_test("case", CASES)
def test_terraform_holds_the_template_in_one_stack(case: str) -> None:
    found = terraform(case)
    assert json.loads(stack_of(found)["template_body"]) == exported(case)
    assert found["resource"].keys() == {"aws_cloudformation_stack"}
    assert found["terraform"]["required_providers"]["aws"]["source"] == "hashicorp/aws"
    assert found["provider"] == {"aws": {"region": "eu-west-1"}}


def test_terraform_gives_the_endpoints_name_out() -> None:
    found = terraform("plain")
    assert stack_of(found)["name"] == "lmi-" + exported("plain")["Resources"]["Endpoint"]["Properties"]["EndpointName"]
    assert found["output"]["endpoint_name"]["value"] == '${aws_cloudformation_stack.endpoint.outputs["EndpointName"]}'
    assert "EndpointName" in exported("plain")["Outputs"]


def test_terraform_waits_as_long_as_a_start_and_an_update_may_take() -> None:
    """SageMaker: 3600 s each to find an instance, to download and to start; 28800 s for an update."""
    timeouts = stack_of(terraform("plain"))["timeouts"]
    assert timeouts == {"create": "3h", "update": "9h", "delete": "3h"}


def test_expressions_in_values_are_text_to_terraform() -> None:
    body = stack_of(terraform("plain", environment={"TEMPLATE": "${name} %{if}"}))["template_body"]
    assert "$${name} %%{if}" in body
    assert "${" not in body.replace("$${", "")


def test_a_template_above_the_inline_limit_is_refused() -> None:
    component = {"memory_mb": 1024, "accelerators": 1}
    many = [{"name": f"llama-{number}", **component} for number in range(60)]
    with pytest.raises(Refused, match="an inline template may have at most 51,200") as raised:
        terraform("components", components=many, scaling=None)
    assert "CloudFormation" in raised.value.advice


# -- a program of SageMaker's SDK --------------------------------------------------------------------------------------


def program(case: str, **changes: Any) -> str:
    return sdk_program(resources(spec(case, **changes), decision(case)), "eu-west-1")


@in_one_test("case", CASES)
def test_a_program_creates_each_resource_once(case: str) -> None:
    text = program(case)
    compile(text, case, "exec")
    made = resources(spec(case), decision(case))
    created = re.findall(r"^(?:\w+ = )?(?:\w+\.(?:create|create_\w+|put_\w+|register_\w+))\(", text, re.M)
    assert len(created) == len(made)


def test_requests_are_objects_that_are_built_first() -> None:
    head, _, calls = program("single").partition("\n\nModel.create(")
    assert "model = dict(\n    model_name=" in head
    assert "primary_container=ContainerDefinition(" in head
    assert '            "OPTION_LLM_ENGINE": "trtllm",\n' in head
    assert calls.splitlines()[1:] == [
        "EndpointConfig.create(**config, region=REGION)",
        "Endpoint.create(**endpoint, region=REGION)",
        'Endpoint.get("llama", region=REGION).wait_for_status("InService")',
    ]
    assert "boto3" not in head + calls


def test_what_the_sdk_drops_is_left_to_boto3() -> None:
    text = program("components")
    assert "drops values of 0 and False: MinInstanceCount\ncontrol.create_endpoint_config(\n" in text
    assert "drops values of 0 and False: EnableCaching\ncontrol.create_inference_component(\n" in text
    assert '"MinInstanceCount": 0' in text
    assert 'InferenceComponent.get("llama-batch", region=REGION).wait_for_status("InService")' in text


def test_a_policys_arn_is_taken_from_its_answer() -> None:
    text = program("components")
    variable = re.search(r'AlarmActions=\[(\w+)\["PolicyARN"\]\]', text)
    assert variable is not None
    assert f"{variable[1]} = scaling.put_scaling_policy(" in text
