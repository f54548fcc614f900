"""The double of AWS does what the tests of `deploy` rely on. By the tests' own clients, who may do everything."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.deploy.doubles.aws import Cloud

ROLE = "arn:aws:iam::123456789012:role/r"


def made(cloud: Cloud, *, model: str | None = "m") -> Any:
    sagemaker = cloud.client("sagemaker")
    sagemaker.create_model(ModelName="m", ExecutionRoleArn=ROLE, PrimaryContainer={"Image": "x"})
    variant = {"VariantName": "v", "InitialInstanceCount": 1, "InstanceType": "ml.p5.48xlarge"}
    if model is not None:
        variant["ModelName"] = model
    for name in ("c1", "c2"):
        sagemaker.create_endpoint_config(EndpointConfigName=name, ProductionVariants=[variant], ExecutionRoleArn=ROLE)
    sagemaker.create_endpoint(EndpointName="e", EndpointConfigName="c1")
    return sagemaker


def states(sagemaker: Any, looks: int) -> list[str]:
    return [sagemaker.describe_endpoint(EndpointName="e")["EndpointStatus"] for _ in range(looks)]


def refused(call: Any, **arguments: Any) -> str:
    with pytest.raises(ClientError) as raised:
        call(**arguments)
    return f"{raised.value.response['Error']['Code']}: {raised.value.response['Error']['Message']}"


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ({}, "Exactly one of InstanceType and InstancePools"),
        (
            {"InstanceType": "ml.g5.xlarge", "InstancePools": [{"InstanceType": "ml.g5.xlarge", "Priority": 1}]},
            "one of",
        ),
        ({"InstancePools": [{"InstanceType": "ml.g5.xlarge", "Priority": n} for n in (1, 2)]}, "of different types"),
        ({"InstancePools": [{"InstanceType": "ml.g5.xlarge", "Priority": 6}]}, "value less than or equal to 5"),
        ({"InstancePools": [{"InstanceType": "ml.x5.xlarge", "Priority": 1}]}, "enum value set"),
        (
            {"InstancePools": [{"InstanceType": "ml.g5.xlarge", "Priority": 1, "ModelNameOverride": "none"}]},
            "model/none",
        ),
    ],
)
def test_pools_are_as_botocores_model_has_them(cloud: Cloud, variant: dict[str, Any], message: str) -> None:
    sagemaker = made(cloud)
    variant = {"VariantName": "v", "ModelName": "m", "InitialInstanceCount": 1, **variant}
    assert message in refused(
        sagemaker.create_endpoint_config, EndpointConfigName="c3", ProductionVariants=[variant], ExecutionRoleArn=ROLE
    )


def test_an_endpoint_is_made_and_changed_by_and_by(cloud: Cloud) -> None:
    sagemaker = made(cloud)
    assert states(sagemaker, 3) == ["Creating", "InService", "InService"]
    sagemaker.update_endpoint(EndpointName="e", EndpointConfigName="c2")
    assert refused(sagemaker.update_endpoint, EndpointName="e", EndpointConfigName="c2").startswith(
        "ValidationException: Cannot update in-progress endpoint"
    )
    assert states(sagemaker, 1) == ["InService"]
    assert sagemaker.describe_endpoint(EndpointName="e")["EndpointConfigName"] == "c2"


def test_ends_can_be_chosen(cloud: Cloud) -> None:
    cloud.sagemaker.fate("e", "InService", polls=2)
    cloud.sagemaker.fate("e", "RolledBack", "an alarm went off")
    cloud.sagemaker.fate("e", "Failed", "no capacity")
    sagemaker = made(cloud)
    assert states(sagemaker, 3) == ["Creating", "Creating", "InService"]
    sagemaker.update_endpoint(EndpointName="e", EndpointConfigName="c2")
    assert states(sagemaker, 2) == ["Updating", "InService"]
    said = sagemaker.describe_endpoint(EndpointName="e")
    assert (said["EndpointConfigName"], said["FailureReason"]) == ("c1", "an alarm went off")
    sagemaker.update_endpoint(EndpointName="e", EndpointConfigName="c2")
    assert states(sagemaker, 2) == ["Updating", "Failed"]


def test_conflicts_are_said_as_aws_says_them(cloud: Cloud) -> None:
    sagemaker = made(cloud)
    assert refused(sagemaker.create_model, ModelName="m", ExecutionRoleArn=ROLE, PrimaryContainer={"Image": "x"}) == (
        'ValidationException: Cannot create already existing model "arn:aws:sagemaker:us-east-1:123456789012:model/m".'
    )
    assert refused(sagemaker.describe_endpoint, EndpointName="f") == (
        'ValidationException: Could not find endpoint "arn:aws:sagemaker:us-east-1:123456789012:endpoint/f".'
    )
    assert refused(sagemaker.delete_endpoint_config, EndpointConfigName="c3").startswith(
        "ValidationException: Could not find endpoint configuration"
    )


def test_an_endpoint_goes_by_and_by_and_its_scaling_with_it(cloud: Cloud) -> None:
    sagemaker = made(cloud)
    states(sagemaker, 2)
    scaling = cloud.client("application-autoscaling")
    target = {
        "ServiceNamespace": "sagemaker",
        "ResourceId": "endpoint/e/variant/v",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }
    scaling.register_scalable_target(**target, MinCapacity=1, MaxCapacity=2, Tags={"a": "b"})
    arn = scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"][0]["ScalableTargetARN"]
    assert scaling.list_tags_for_resource(ResourceARN=arn)["Tags"] == {"a": "b"}
    sagemaker.delete_endpoint(EndpointName="e")
    assert states(sagemaker, 1) == ["Deleting"]
    refused(sagemaker.describe_endpoint, EndpointName="e")
    assert refused(scaling.deregister_scalable_target, **target).startswith("ObjectNotFoundException")


def test_components_live_on_an_endpoint_in_service(cloud: Cloud) -> None:
    sagemaker = made(cloud, model=None)
    component: dict[str, Any] = {
        "InferenceComponentName": "ic",
        "EndpointName": "e",
        "VariantName": "v",
        "Specification": {
            "ModelName": "m",
            "ComputeResourceRequirements": {"NumberOfAcceleratorDevicesRequired": 1, "MinMemoryRequiredInMb": 1024},
        },
        "RuntimeConfig": {"CopyCount": 2},
    }
    assert "not InService" in refused(sagemaker.create_inference_component, **component)
    states(sagemaker, 2)
    sagemaker.create_inference_component(**component)
    said = [sagemaker.describe_inference_component(InferenceComponentName="ic") for _ in range(2)]
    assert [one["InferenceComponentStatus"] for one in said] == ["Creating", "InService"]
    assert said[-1]["RuntimeConfig"]["DesiredCopyCount"] == 2
    adapter = {
        **component,
        "InferenceComponentName": "lora",
        "Specification": {"BaseInferenceComponentName": "ic", "Container": {"ArtifactUrl": "s3://b/a.tar.gz"}},
    }
    del adapter["RuntimeConfig"]
    sagemaker.create_inference_component(**adapter)
    assert "uses it" in refused(sagemaker.delete_inference_component, InferenceComponentName="ic")
    assert "with inference components" in refused(sagemaker.delete_endpoint, EndpointName="e")
    listed = sagemaker.list_inference_components(EndpointNameEquals="e")["InferenceComponents"]
    assert [one["InferenceComponentName"] for one in listed] == ["ic", "lora"]


def test_pages_have_ten_and_tags_are_kept(cloud: Cloud) -> None:
    sagemaker = cloud.client("sagemaker")
    for number in range(12):
        sagemaker.create_model(ModelName=f"m{number:02}", ExecutionRoleArn=ROLE, PrimaryContainer={"Image": "x"})
    assert len(sagemaker.list_models(NameContains="m")["Models"]) == 10
    pages = sagemaker.get_paginator("list_models").paginate(NameContains="m0")
    assert [len(page["Models"]) for page in pages] == [10]
    arn = sagemaker.describe_model(ModelName="m00")["ModelArn"]
    sagemaker.add_tags(ResourceArn=arn, Tags=[{"Key": "a", "Value": "b"}])
    assert sagemaker.list_tags(ResourceArn=arn)["Tags"] == [{"Key": "a", "Value": "b"}]
