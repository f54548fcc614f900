"""Each member of each operation that the emulator answers itself is used, checked, shown, or named in docs/local.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore import xform_name
from botocore.exceptions import ClientError
from botocore.model import OperationModel
from moto.applicationautoscaling.responses import ApplicationAutoScalingResponse
from moto.sagemaker.responses import SageMakerResponse

from deploy.service_model import service
from tests.deploy.doubles.aws import Cloud

ROOT = Path(__file__).parents[3]
ROLE = "arn:aws:iam::123456789012:role/model"
TARGET = {
    "ServiceNamespace": "sagemaker",
    "ResourceId": "endpoint/e/variant/v",
    "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
}
TRACKING = {
    "TargetValue": 5.0,
    "PredefinedMetricSpecification": {"PredefinedMetricType": "SageMakerVariantInvocationsPerInstance"},
}


def answered(name: str, responses: type) -> Iterator[OperationModel]:
    model = service(name)
    for operation in model.operation_names:
        method = vars(responses).get(xform_name(operation))
        if method is not None and method.__module__.startswith("deploy."):
            yield model.operation_model(operation)


def shown(operation: OperationModel) -> set[str]:
    """The members of what the operation creates that its description shows: the emulator stores the request."""
    describe = operation.name.replace("Create", "Describe", 1)
    model = operation.service_model
    if not operation.name.startswith("Create") or describe not in model.operation_names:
        return set()
    return set(model.operation_model(describe).output_shape.members)


def test_no_member_is_dropped(cloud: Cloud) -> None:
    code = "".join(path.read_text() for path in sorted((ROOT / "deploy/emulator").glob("*.py")))
    document = (ROOT / "docs/local.md").read_text()
    dropped, number = [], 0
    for name, responses in (
        ("sagemaker", SageMakerResponse),
        ("application-autoscaling", ApplicationAutoScalingResponse),
    ):
        for operation in answered(name, responses):
            members = {} if operation.input_shape is None else operation.input_shape.members
            number += len(members)
            known = shown(operation)
            for member in members:
                if member not in known and f'"{member}"' not in code and f"`{member}`" not in document:
                    dropped.append(f"{operation.name}.{member}")
    assert dropped == []
    assert number > 150, "the emulator's own operations were not found"


@pytest.fixture
def sagemaker(cloud: Cloud) -> Any:
    """An account with a model, and the endpoint `e`, whose variant `v` has no model."""
    client = cloud.client("sagemaker")
    client.create_model(ModelName="m", ExecutionRoleArn=ROLE, PrimaryContainer={"Image": "x"})
    configured(client, "c", {})
    client.create_endpoint(EndpointName="e", EndpointConfigName="c")
    settle(client, "e")
    return client


def configured(client: Any, name: str, *changes: dict[str, Any]) -> None:
    variant = {"VariantName": "v", "InstanceType": "ml.g6.xlarge", "InitialInstanceCount": 1}
    client.create_endpoint_config(
        EndpointConfigName=name,
        ExecutionRoleArn=ROLE,
        ProductionVariants=[{**variant, **change} for change in changes],
    )


def settle(client: Any, name: str) -> None:
    while client.describe_endpoint(EndpointName=name)["EndpointStatus"] != "InService":
        pass


def refused(call: Any, **arguments: Any) -> str:
    with pytest.raises(ClientError) as raised:
        call(**arguments)
    assert raised.value.response["Error"]["Code"].startswith("Validation")
    return str(raised.value)


def component(**changes: Any) -> dict[str, Any]:
    needs = {"MinMemoryRequiredInMb": 1024, "NumberOfAcceleratorDevicesRequired": 1}
    specification = {"ModelName": "m", "ComputeResourceRequirements": needs}
    return {
        "InferenceComponentName": "ic",
        "EndpointName": "e",
        "VariantName": "v",
        "Specification": specification,
        "RuntimeConfig": {"CopyCount": 1},
        **changes,
    }


def test_a_component_names_a_variant_without_a_model(sagemaker: Any) -> None:
    assert "Could not find variant" in refused(sagemaker.create_inference_component, **component(VariantName="w"))
    configured(sagemaker, "c2", {"ModelName": "m"})
    sagemaker.create_endpoint(EndpointName="e2", EndpointConfigName="c2")
    settle(sagemaker, "e2")
    assert "it has a model" in refused(sagemaker.create_inference_component, **component(EndpointName="e2"))
    several = component(Specifications=[{**component()["Specification"], "InstanceType": "ml.g5.xlarge"}])
    del several["Specification"]
    assert "no instance type ml.g5.xlarge" in refused(sagemaker.create_inference_component, **several)
    sagemaker.create_inference_component(**component())


def test_the_prefix_of_an_additional_model_ends_with_a_slash_too(sagemaker: Any) -> None:
    source = {"S3Uri": "s3://models/draft", "S3DataType": "S3Prefix", "CompressionType": "None"}
    container = {"Image": "x", "AdditionalModelDataSources": [{"ChannelName": "draft", "S3DataSource": source}]}
    asked = {"ModelName": "n", "ExecutionRoleArn": ROLE, "PrimaryContainer": container}
    assert "forward slash" in refused(sagemaker.create_model, **asked)
    source["S3Uri"] += "/"
    sagemaker.create_model(**asked)


def test_names_prefixes_and_limits_are_checked(cloud: Cloud, sagemaker: Any) -> None:
    with pytest.raises(ClientError, match="must be unique"):
        configured(sagemaker, "twice", {}, {})
    managed = {"Status": "ENABLED", "MinInstanceCount": 3, "MaxInstanceCount": 2}
    with pytest.raises(ClientError, match="must not be greater"):
        configured(sagemaker, "managed", {"ManagedInstanceScaling": managed})
    source = {"S3Uri": "s3://models/llama", "S3DataType": "S3Prefix", "CompressionType": "None"}
    container = {"Image": "x", "ModelDataSource": {"S3DataSource": source}}
    asked = {"ModelName": "n", "ExecutionRoleArn": ROLE, "PrimaryContainer": container}
    assert "forward slash" in refused(sagemaker.create_model, **asked)
    source["S3Uri"] += "/"
    sagemaker.create_model(**asked)
    scaling = cloud.client("application-autoscaling")
    register = scaling.register_scalable_target
    assert "required" in refused(register, **TARGET)
    assert "less than minimum" in refused(register, **TARGET, MinCapacity=2, MaxCapacity=1)
    other = {**TARGET, "ResourceId": "endpoint/e/variant/w"}
    assert "variant not found" in refused(register, **other, MinCapacity=1, MaxCapacity=2)
    register(**TARGET, MinCapacity=1, MaxCapacity=2)
    assert "less than minimum" in refused(register, **TARGET, MinCapacity=3)
    register(**TARGET, MinCapacity=2)
    (target,) = scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
    assert (target["MinCapacity"], target["MaxCapacity"]) == (2, 2)
    assert scaling.describe_scalable_targets(ServiceNamespace="ecs")["ScalableTargets"] == []
    assert "requires" in refused(
        scaling.put_scaling_policy, **TARGET, PolicyName="p", PolicyType="TargetTrackingScaling"
    )
    assert scaling.describe_scaling_activities(ServiceNamespace="sagemaker")["ScalingActivities"] == []
    for name in ("a", "b", "c"):
        scaling.put_scaling_policy(
            **TARGET, PolicyName=name, PolicyType="TargetTrackingScaling",
            TargetTrackingScalingPolicyConfiguration=TRACKING,
        )  # fmt: skip
    pages = scaling.get_paginator("describe_scaling_policies").paginate(ServiceNamespace="sagemaker", MaxResults=2)
    assert [[policy["PolicyName"] for policy in page["ScalingPolicies"]] for page in pages] == [["a", "b"], ["c"]]


@pytest.mark.parametrize("kind", ["model", "endpoint_config", "endpoint", "inference_component"])
def test_lists_are_filtered_and_sorted(sagemaker: Any, kind: str) -> None:
    words = "".join(word.capitalize() for word in kind.split("_"))
    for name in ("za", "zb"):
        sagemaker.create_model(ModelName=name, ExecutionRoleArn=ROLE, PrimaryContainer={"Image": "x"})
        configured(sagemaker, name, {})
        sagemaker.create_endpoint(EndpointName=name, EndpointConfigName=name)
        sagemaker.create_inference_component(**component(InferenceComponentName=name))

    def names(**how: Any) -> list[str]:
        found = getattr(sagemaker, f"list_{kind}s")(NameContains="Z", **how)[f"{words}s"]
        return [item[f"{words}Name"] for item in found]

    assert names() == ["zb", "za"]
    assert names(SortOrder="Ascending") == ["za", "zb"]
    assert names(SortBy="Name", SortOrder="Ascending", MaxResults=1) == ["za"]
    described = getattr(sagemaker, f"describe_{kind}")(**{f"{words}Name": "zb"})
    assert names(CreationTimeAfter=described["CreationTime"]) == []
    assert names(CreationTimeBefore=described["CreationTime"]) == ["za"]
    if kind in ("endpoint", "inference_component"):
        assert names(StatusEquals="Failed") == []
        assert names(LastModifiedTimeBefore=described["CreationTime"]) == ["za"]


def test_an_update_keeps_what_it_is_told_to(sagemaker: Any) -> None:
    changed = [{"VariantName": "v", "DesiredInstanceCount": 3, "DesiredWeight": 2.0}]
    sagemaker.update_endpoint_weights_and_capacities(EndpointName="e", DesiredWeightsAndCapacities=changed)
    settle(sagemaker, "e")
    configured(sagemaker, "c2", {})
    sagemaker.update_endpoint(
        EndpointName="e",
        EndpointConfigName="c2",
        RetainAllVariantProperties=True,
        ExcludeRetainedVariantProperties=[{"VariantPropertyType": "DesiredWeight"}],
    )
    settle(sagemaker, "e")
    (variant,) = sagemaker.describe_endpoint(EndpointName="e")["ProductionVariants"]
    assert (variant["DesiredInstanceCount"], variant["DesiredWeight"]) == (3, 1.0)


def test_a_deleted_configuration_serves_on(sagemaker: Any) -> None:
    sagemaker.delete_endpoint_config(EndpointConfigName="c")
    sagemaker.delete_model(ModelName="m")
    (variant,) = sagemaker.describe_endpoint(EndpointName="e")["ProductionVariants"]
    assert variant["VariantName"] == "v"
