"""Endpoints in the double of AWS, made by plain calls, for tests of what looks at them."""

from __future__ import annotations

from typing import Any

from tests.deploy.aws import ACCOUNT, Cloud

ROLE = f"arn:aws:iam::{ACCOUNT}:role/lmi"
IMAGE = f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/lmi:1"


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def make_endpoint(cloud: Cloud, name: str = "chat", components: tuple[str, ...] = (), instances: int = 1) -> Any:
    """One variant `main`; with components, without a model of its own. Returns SageMaker's client."""
    sagemaker = cloud.client("sagemaker")
    sagemaker.create_model(ModelName=f"{name}-m", ExecutionRoleArn=ROLE, PrimaryContainer={"Image": IMAGE})
    variant = {"VariantName": "main", "InstanceType": "ml.g5.xlarge", "InitialInstanceCount": instances}
    if not components:
        variant["ModelName"] = f"{name}-m"
    for version in ("1", "2"):
        sagemaker.create_endpoint_config(
            EndpointConfigName=f"{name}-{version}", ProductionVariants=[variant], ExecutionRoleArn=ROLE
        )
    sagemaker.create_endpoint(EndpointName=name, EndpointConfigName=f"{name}-1")
    if components:
        settle(sagemaker, name)
    for component in components:
        make_component(sagemaker, name, component)
    return sagemaker


def make_component(sagemaker: Any, endpoint: str, name: str, base: str | None = None) -> None:
    """With a model of its own, or an adapter of `base`."""
    specification: dict[str, Any] = {"Container": {"ArtifactUrl": "s3://b/a.tar.gz"}}
    specification["BaseInferenceComponentName"] = base
    if base is None:
        needs = {"NumberOfAcceleratorDevicesRequired": 1, "MinMemoryRequiredInMb": 1024}
        specification = {"ModelName": f"{endpoint}-m", "ComputeResourceRequirements": needs}
    sagemaker.create_inference_component(
        InferenceComponentName=name, EndpointName=endpoint, VariantName="main", Specification=specification,
        RuntimeConfig={"CopyCount": 1},
    )  # fmt: skip
    while sagemaker.describe_inference_component(InferenceComponentName=name)["InferenceComponentStatus"] == "Creating":
        pass


def settle(sagemaker: Any, name: str = "chat") -> None:
    """Look until nothing changes any more: the double goes on with each look."""
    while sagemaker.describe_endpoint(EndpointName=name)["EndpointStatus"] not in ("InService", "Failed"):
        pass
