"""Deployments beside others: `capture`, `shadow` and `reservation`, and a guest on another's endpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.deployer.wait import time_limit
from deploy.errors import SpecError
from deploy.export.cloudformation import cloudformation_template, terraform_configuration
from deploy.iam.policies import policies
from deploy.resources.build import resources, warnings
from deploy.resources.resource import Kind
from deploy.spec.components import deployment_of, is_guest, name_and_endpoint
from deploy.spec.reading import read_spec
from tests.deploy.cases import KEY, decision, deployer, invoker, spec
from tests.deploy.strict import wrong_in
from tests.deploy.unit.test_passthrough import refused
from tests.one_test import in_one_test

# -- `capture`, `shadow` and `reservation`: what they do not go with, and what an export makes of them -----------------


PLAN = "arn:aws:sagemaker:eu-west-1:123456789012:training-plan/llama"
CAPTURE = {"output": "s3://captured/llama/"}
SHADOW: dict[str, Any] = {"percent": 10, "options": {"max_rolling_batch_size": 8}}
NAMED = {"instance": {"type": "ml.g6e.xlarge"}}
COMPONENTS = {"components": [{"name": "chat"}]}


@in_one_test(
    ("content", "line"),
    [
        ({"capture": {**CAPTURE, "percent": 0}}, "capture.percent: must be at least 1 (given: 0)"),
        ({"capture": {**CAPTURE, "content": "all"}}, "capture.content: must be both, input or output"),
        ({"capture": {"output": "captured"}}, "capture.output: must be written as s3://bucket/answers/"),
        ({"capture": CAPTURE, "async": {"output": "s3://answers/"}}, "capture cannot be combined with async"),
        ({"encryption": {"capture_key": KEY}}, "encryption.capture_key requires capture"),
        (
            {"capture": CAPTURE, "sagemaker": {"endpoint_config": {"DataCaptureConfig": {
                "InitialSamplingPercentage": 1, "DestinationS3Uri": "s3://b/x",
                "CaptureOptions": [{"CaptureMode": "Input"}]}}}},
            "sagemaker.endpoint_config.DataCaptureConfig: cannot be combined with capture, which sets it",
        ),
        ({"shadow": {"percent": 10}}, "shadow: is the same as the serving variant; set image, model, options, "
                                      "environment or type"),
        (
            {"shadow": {"percent": 10, "model": {"path": "models", "upload": "s3://models/x/"}}},
            "shadow: model.path is not supported for the shadow variant",
        ),
        ({"shadow": {"percent": 10, "model": {}}}, "shadow.model: set exactly one of id, s3, path"),
        (
            {"shadow": SHADOW, "instance": {"type": "ml.g6e.xlarge", "variant": "Shadow"}},
            "instance.variant: Shadow is reserved for the shadow variant",
        ),
        ({"shadow": SHADOW, **COMPONENTS}, "shadow cannot be combined with components"),
        ({"shadow": SHADOW, "async": {"output": "s3://answers/"}}, "shadow cannot be combined with async"),
        ({"shadow": SHADOW, "instance": {"pools": [{"type": "ml.g6e.xlarge"}]}}, "shadow.type: is required"),
        (
            {"shadow": {"percent": 1, "model": {"id": "a/b"}}, "network": {"isolated": True},
             "model": {"s3": "s3://models/x/"}},
            "network.isolated: the container cannot reach the hub; use shadow.model.s3",
        ),
        (
            {"shadow": SHADOW, "sagemaker": {"endpoint_config": {"ShadowProductionVariants": [{"VariantName": "S"}]}}},
            "sagemaker.endpoint_config.ShadowProductionVariants: cannot be combined with shadow, which sets it",
        ),
        ({"reservation": "llama", **NAMED}, "reservation: must be written as arn:aws:sagemaker:"),
        ({"reservation": PLAN, "region": "us-east-1", **NAMED}, "reservation: is in eu-west-1, but the endpoint is"),
        ({"reservation": PLAN}, "reservation: is for a single instance type; set instance.type to that type"),
        (
            {"reservation": PLAN, **NAMED, "sagemaker": {"variant": {"CapacityReservationConfig": {}}}},
            "sagemaker.variant.CapacityReservationConfig: cannot be combined with reservation, which sets it",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_said_in_beside(content: dict[str, Any], line: str, tmp_path: Path) -> None:
    lines = refused(content, tmp_path)
    assert [one for one in lines if one.startswith(line)] != [], lines


def test_all_three_are_valid_requests_and_a_template() -> None:
    said = spec("plain", capture=CAPTURE, shadow=SHADOW, reservation=PLAN, encryption={"capture_key": KEY})
    decided = decision("plain", shadow=decision("plain"))
    made = resources(said, decided)
    assert [line for item in made for line in wrong_in(item)] == []
    properties = cloudformation_template(made)["Resources"]["EndpointConfig"]["Properties"]
    (shadow,) = properties["ShadowProductionVariants"]
    assert shadow["ModelName"] == {"Fn::GetAtt": ["ModelX", "ModelName"]}
    assert "CapacityReservationConfig" not in shadow
    assert properties["DataCaptureConfig"]["KmsKeyId"] == KEY
    assert [one.partition(":")[0] for one in warnings(said, decided)] == ["capture", "shadow", "reservation"]
    role = {one["Sid"]: one for one in policies(said, decided)["execution-role"]["Statement"]}
    assert role["CaptureKey"]["Resource"] == [KEY]
    deployer = {one["Sid"]: one for one in policies(said, decided)["deployer"]["Statement"]}
    assert deployer["ReservationChecked"]["Resource"] == [PLAN]
    assert deployer["PlacesChecked"]["Condition"] == {"StringLike": {"s3:prefix": ["llama/*"]}}


def test_a_shadow_has_options_and_variables_over_those_of_what_serves() -> None:
    shadow = {"percent": 10, "options": {"job_queue_size": 9}, "environment": {"MODE": "next"}}
    made = resources(spec("plain", shadow=shadow), decision("plain", shadow=decision("plain")))
    serving, other = (item.request["PrimaryContainer"]["Environment"] for item in made[:2])
    assert (serving["SERVING_JOB_QUEUE_SIZE"], other["SERVING_JOB_QUEUE_SIZE"]) == ("200", "9")
    assert (serving.get("MODE"), other["MODE"]) == (None, "next")
    assert other["OPTION_LLM_ENGINE"] == serving["OPTION_LLM_ENGINE"]


def test_updates_wait_for_the_slower_start() -> None:
    alone, slow = decision("plain"), decision("plain", download=3600, startup=3600)
    beside = decision("plain", shadow=slow)
    assert (alone.start, beside.start) == (1500, 7200)
    assert time_limit(beside) - time_limit(alone) == 5700.0


# -- a deployment on another one's endpoint: what it is called, what it may not set, and its exports -------------------


GUEST: dict[str, Any] = {
    "name": "team-b",
    "endpoint": "shared",
    "role": "arn:aws:iam::111122223333:role/x",
    "image": {"repository": "lmi", "tag": "1-cu130"},
    "model": {"s3": "s3://models/llama/"},
    "instance": {"type": "ml.g6e.12xlarge"},
    "components": [{"name": "rank"}],
}


def test_a_tag_is_of_one_deployment_only() -> None:
    assert deployment_of("shared") == "shared"
    assert deployment_of("team-b", "shared") == "team-b@shared"
    assert name_and_endpoint("shared") == ("shared", "shared")
    assert name_and_endpoint("team-b@shared") == ("team-b", "shared")
    assert not is_guest("shared")
    assert is_guest("team-b@shared")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"endpoint": "team-b"}, "endpoint: team-b is this deployment's own name"),
        ({"components": []}, "endpoint: requires components"),
        ({"instance": {"type": "auto"}}, "endpoint: requires instance.type to be the type"),
        ({"routing": "random"}, "routing belongs to the endpoint shared"),
        ({"network": {"isolated": True}}, "network belongs to the endpoint shared"),
        (
            {"instance": {"type": "ml.g6e.12xlarge", "managed": {"max": 2}}},
            "instance.managed belongs to the endpoint shared",
        ),
        ({"instance": {"type": "ml.g6e.12xlarge", "ami": "x"}}, "instance.ami belongs to the endpoint shared"),
        ({"instance": {"pools": [{"type": "ml.g6e.12xlarge"}]}}, "instance.pools belongs to the endpoint shared"),
        ({"timeouts": {"provision": 600}}, "timeouts.provision belongs to the endpoint shared"),
        ({"encryption": {"volume_key": "alias/x"}}, "encryption.volume_key belongs to the endpoint shared"),
        ({"capture": {"output": "s3://captured/"}}, "capture belongs to the endpoint shared"),
        (
            {"reservation": "arn:aws:sagemaker:eu-west-1:111122223333:training-plan/x"},
            "reservation belongs to the endpoint shared",
        ),
        (
            {"sagemaker": {"endpoint_config": {"MetricsConfig": {"EnableEnhancedMetrics": True}}}},
            "sagemaker.endpoint_config belongs to the endpoint shared",
        ),
        ({"sagemaker": {"variant": {"EnableSSMAccess": True}}}, "sagemaker.variant belongs to the endpoint shared"),
        (
            {"sagemaker": {"endpoint": {"DeploymentConfig": {"RollingUpdatePolicy": {}}}}},
            "sagemaker.endpoint belongs to the endpoint shared",
        ),
        (
            {"batch": {"input": "s3://data/in/", "output": "s3://answers/out"}},
            "batch: cannot be combined with endpoint",
        ),
        ({"shadow": {"percent": 5, "environment": {"MODE": "next"}}}, "shadow cannot be combined with components"),
    ],
)
def test_what_is_the_owners_is_refused_by_name(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "guest.yaml"
    path.write_text(yaml.safe_dump(GUEST))
    read_spec(path)
    path.write_text(yaml.safe_dump({**GUEST, **changes}))
    with pytest.raises(SpecError) as raised:
        read_spec(path)
    assert said in str(raised.value)


def test_the_owner_of_the_endpoint_names_its_partitions() -> None:
    kind = {"Specification": {"ComputeResourceRequirements": {"AcceleratorPartitionType": "mig-1g.10gb"}}}
    said = spec("guest", components=[{"name": "rank", "accelerators": 1, "sagemaker": kind}])
    (component,) = [one for one in resources(said, decision("guest")) if one.kind is Kind.COMPONENT]
    needs = component.request["Specification"]["ComputeResourceRequirements"]
    assert needs["AcceleratorPartitionType"] == "mig-1g.10gb"


def test_it_makes_no_endpoint_and_may_change_none() -> None:
    made = resources(spec("guest"), decision("guest"))
    assert not {Kind.ENDPOINT, Kind.ENDPOINT_CONFIG} & {one.kind for one in made}
    (component,) = [one for one in made if one.kind is Kind.COMPONENT]
    assert component.request["EndpointName"] == "llama"
    assert {"Key": "lmi:deployment", "Value": "team-b@llama"} in component.request["Tags"]
    policy = deployer(spec("guest"), decision("guest"))
    actions = {action for one in policy["Statement"] for action in one["Action"]}
    assert not actions & {f"sagemaker:{verb}Endpoint" for verb in ("Create", "Update", "Delete")}
    (former,) = [one for one in policy["Statement"] if one["Sid"] == "FormerComponents"]
    assert former["Condition"] == {"StringEquals": {"aws:ResourceTag/lmi:deployment": "team-b@llama"}}
    asked = invoker(spec("guest"), decision("guest"))["Statement"][0]["Resource"]
    assert asked[0].endswith(":endpoint/llama")


def test_its_template_names_the_endpoint_of_the_other() -> None:
    made = resources(spec("guest"), decision("guest"))
    template = cloudformation_template(made)
    assert template["Outputs"]["EndpointName"]["Value"] == "llama"
    assert "team-b, on the SageMaker endpoint llama" in template["Description"]
    assert {"Model", "InferenceComponentRank"} <= set(template["Resources"])
    component = template["Resources"]["InferenceComponentRank"]["Properties"]
    assert component["EndpointName"] == "llama"
    assert component["Specification"]["ModelName"] == {"Fn::GetAtt": ["Model", "ModelName"]}
    stack = terraform_configuration(made, "eu-west-1")["resource"]["aws_cloudformation_stack"]["endpoint"]
    assert stack["name"] == "lmi-team-b"
    assert json.loads(stack["template_body"])["Outputs"]["EndpointName"]["Value"] == "llama"


def test_a_template_names_each_model_by_its_component() -> None:
    template = cloudformation_template(resources(spec("own-models"), decision("own-models")))
    models = [name for name, one in template["Resources"].items() if one["Type"] == "AWS::SageMaker::Model"]
    assert models == ["Model", "ModelEmbed", "ModelOld"]
    embed = template["Resources"]["InferenceComponentEmbed"]["Properties"]["Specification"]
    assert embed["ModelName"] == {"Fn::GetAtt": ["ModelEmbed", "ModelName"]}
