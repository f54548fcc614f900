"""A deployment on another one's endpoint: what it is called, what it may not set, and its exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.errors import SpecError
from deploy.export.cloudformation import cloudformation_template, terraform_configuration
from deploy.resources.build import resources
from deploy.resources.resource import Kind
from deploy.spec.components import deployment_of, is_guest, name_and_endpoint
from deploy.spec.reading import read_spec
from tests.deploy.cases import decision, deployer, invoker, spec

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
        ({"components": []}, "endpoint: only components go onto another deployment's endpoint"),
        ({"instance": {"type": "auto"}}, "endpoint: instance.type must be named"),
        ({"routing": "random"}, "routing is of the endpoint shared"),
        ({"network": {"isolated": True}}, "network is of the endpoint shared"),
        (
            {"instance": {"type": "ml.g6e.12xlarge", "managed": {"max": 2}}},
            "instance.managed is of the endpoint shared",
        ),
        ({"instance": {"type": "ml.g6e.12xlarge", "ami": "x"}}, "instance.ami is of the endpoint shared"),
        ({"instance": {"pools": [{"type": "ml.g6e.12xlarge"}]}}, "instance.pools is of the endpoint shared"),
        ({"timeouts": {"provision": 600}}, "timeouts.provision is of the endpoint shared"),
        ({"encryption": {"volume_key": "alias/x"}}, "encryption.volume_key is of the endpoint shared"),
        ({"capture": {"output": "s3://captured/"}}, "capture is of the endpoint shared"),
        (
            {"reservation": "arn:aws:sagemaker:eu-west-1:111122223333:training-plan/x"},
            "reservation is of the endpoint shared",
        ),
        (
            {"sagemaker": {"endpoint_config": {"MetricsConfig": {"EnableEnhancedMetrics": True}}}},
            "sagemaker.endpoint_config is of the endpoint shared",
        ),
        ({"sagemaker": {"variant": {"EnableSSMAccess": True}}}, "sagemaker.variant is of the endpoint shared"),
        (
            {"sagemaker": {"endpoint": {"DeploymentConfig": {"RollingUpdatePolicy": {}}}}},
            "sagemaker.endpoint is of the endpoint shared",
        ),
        (
            {"batch": {"input": "s3://data/in/", "output": "s3://answers/out"}},
            "batch: does not go with endpoint, which a job does not need",
        ),
        ({"shadow": {"percent": 5, "environment": {"MODE": "next"}}}, "shadow does not go with components"),
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
