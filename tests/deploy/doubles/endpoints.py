"""Endpoints in the double of AWS, made by plain calls, for tests of what looks at them."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from moto.servicequotas.responses import ServiceQuotasResponse

from deploy.aws import Aws
from deploy.resources.resource import TAG_DEPLOYMENT
from tests.deploy.doubles.aws import ACCOUNT, Cloud

ROLE = f"arn:aws:iam::{ACCOUNT}:role/lmi"
IMAGE = f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/lmi:1"


_DOCKER = "application/vnd.docker"
MANIFEST = {
    "schemaVersion": 2,
    "mediaType": f"{_DOCKER}.distribution.manifest.v2+json",
    "config": {"mediaType": f"{_DOCKER}.container.image.v1+json", "size": 1, "digest": "sha256:" + "c" * 64},
    "layers": [{"mediaType": f"{_DOCKER}.image.rootfs.diff.tar.gzip", "size": 5, "digest": "sha256:" + "1" * 64}],
}


@functools.cache
def aws() -> Aws:
    """One for all tests that take `cloud`: making boto3's clients takes longer than what they ask."""
    return Aws()


def listed_price(usage: str, price: object, **changes: Any) -> str:
    """An entry of the Pricing API's list."""
    dimensions = {"A.B": {"unit": "Hrs", "pricePerUnit": {"USD": price}, "description": "an hour"}}
    return json.dumps(
        {
            "product": {"productFamily": "ML Instance", "attributes": {"usagetype": usage, "component": "Hosting"}},
            "serviceCode": "AmazonSageMaker",
            "terms": {"OnDemand": {"A": {"priceDimensions": dimensions, "termAttributes": {}}}},
            **changes,
        }
    )


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def make_endpoint(cloud: Cloud, name: str = "chat", components: tuple[str, ...] = (), instances: int = 1) -> Any:
    """One variant `main`; with components, without a model of its own. Ours by its tag. Returns SageMaker's client."""
    sagemaker = cloud.client("sagemaker")
    sagemaker.create_model(ModelName=f"{name}-m", ExecutionRoleArn=ROLE, PrimaryContainer={"Image": IMAGE})
    variant = {"VariantName": "main", "InstanceType": "ml.g5.xlarge", "InitialInstanceCount": instances}
    if not components:
        variant["ModelName"] = f"{name}-m"
    for version in ("1", "2"):
        sagemaker.create_endpoint_config(
            EndpointConfigName=f"{name}-{version}", ProductionVariants=[variant], ExecutionRoleArn=ROLE
        )
    sagemaker.create_endpoint(EndpointName=name, EndpointConfigName=f"{name}-1", Tags=_owned(name))
    if components:
        settle(sagemaker, name)
    for component in components:
        make_component(sagemaker, name, component)
    return sagemaker


def _owned(name: str) -> list[dict[str, str]]:
    return [{"Key": TAG_DEPLOYMENT, "Value": name}]


def make_component(sagemaker: Any, endpoint: str, name: str, base: str | None = None) -> None:
    """With a model of its own, or an adapter of `base`."""
    specification: dict[str, Any] = {"Container": {"ArtifactUrl": "s3://b/a.tar.gz"}}
    specification["BaseInferenceComponentName"] = base
    if base is None:
        needs = {"NumberOfAcceleratorDevicesRequired": 1, "MinMemoryRequiredInMb": 1024}
        specification = {"ModelName": f"{endpoint}-m", "ComputeResourceRequirements": needs}
    sagemaker.create_inference_component(
        InferenceComponentName=name, EndpointName=endpoint, VariantName="main", Specification=specification,
        RuntimeConfig={"CopyCount": 1}, Tags=_owned(endpoint),
    )  # fmt: skip
    while sagemaker.describe_inference_component(InferenceComponentName=name)["InferenceComponentStatus"] == "Creating":
        pass


def settle(sagemaker: Any, name: str = "chat") -> None:
    """Look until nothing changes any more: the double goes on with each look."""
    while sagemaker.describe_endpoint(EndpointName=name)["EndpointStatus"] not in ("InService", "Failed"):
        pass


def make_ready(cloud: Cloud) -> None:
    """What a deployment needs before: the role and the image."""
    trust = {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}
    cloud.client("iam").create_role(RoleName="lmi", AssumeRolePolicyDocument=json.dumps({"Statement": [trust]}))
    ecr = cloud.client("ecr")
    ecr.create_repository(repositoryName="lmi")
    ecr.put_image(repositoryName="lmi", imageTag="1", imageManifest=json.dumps(MANIFEST))
    cloud.calls.clear()


def set_quotas(monkeypatch: pytest.MonkeyPatch, values: dict[str, float]) -> dict[str, float]:
    """Moto 5.2 knows none of SageMaker's quotas and answers 500: the account has `values`, which may be changed."""

    def list_service_quotas(self: Any) -> str:
        return json.dumps({"Quotas": [{"QuotaName": name, "Value": value} for name, value in values.items()]})

    monkeypatch.setattr(ServiceQuotasResponse, "list_service_quotas", list_service_quotas, raising=False)
    return values
