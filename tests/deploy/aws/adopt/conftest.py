"""Endpoints that somebody made by hand, and a caller who may only what is printed for adopting them."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.adopt.live import reading_policy
from deploy.cli.main import main as run
from deploy.spec.reading import read_spec
from tests.deploy.doubles.aws import CALLER, Cloud
from tests.deploy.doubles.deployments import printed
from tests.deploy.public_endpoints import Public

NAME = "chat"


def by_hand(cloud: Cloud, public: Public, tags: dict[str, str] | None = None) -> None:
    """Make the endpoint as its notebook does."""
    sagemaker = cloud.client("sagemaker")
    sagemaker.create_model(**public.model)
    sagemaker.create_endpoint_config(**public.endpoint_config)
    given = [{"Key": key, "Value": value} for key, value in (tags or {}).items()]
    sagemaker.create_endpoint(EndpointName=NAME, EndpointConfigName="by-hand-config", Tags=given)
    while sagemaker.describe_endpoint(EndpointName=NAME)["EndpointStatus"] != "InService":
        pass
    for name, needs in public.components.items():
        sagemaker.create_inference_component(
            InferenceComponentName=name, EndpointName=NAME, VariantName="AllTraffic", RuntimeConfig={"CopyCount": 1},
            Specification={"ModelName": "by-hand-model", "ComputeResourceRequirements": needs},
        )  # fmt: skip
        while sagemaker.describe_inference_component(InferenceComponentName=name)["InferenceComponentStatus"] != (
            "InService"
        ):
            pass
    cloud.calls.clear()


@pytest.fixture
def adopt(cloud: Cloud) -> Callable[..., int]:
    """`lmi deploy adopt chat ...` by somebody who has what `--policy` prints, and nothing else."""

    def call(*arguments: str) -> int:
        cloud.policies[CALLER] = [reading_policy(NAME, "us-east-1")]
        words = ["adopt", *([] if "--file" in arguments else [NAME]), *arguments]
        return run(words)

    return call


@pytest.fixture
def deploy(cloud: Cloud) -> Callable[..., int]:
    """`lmi deploy COMMAND FILE ...` by somebody who has the file's printed policy, and adopt's."""

    def call(command: str, path: Path, *arguments: str) -> int:
        cloud.policies[CALLER] = [printed(read_spec(path)), reading_policy(NAME, "us-east-1")]
        return run([command, str(path), *arguments])

    return call


@pytest.fixture
def planned(
    deploy: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> Callable[[Path], dict[str, dict[str, Any]]]:
    """What `lmi deploy plan FILE --adopt` would do, by the kind and name of the resource."""

    def call(path: Path) -> dict[str, dict[str, Any]]:
        capsys.readouterr()
        assert deploy("plan", path, "--adopt", "--json") == 0
        actions = json.loads(capsys.readouterr().out)["actions"]
        return {f"{one['kind']}/{one['name']}": one for one in actions}

    return call


@pytest.fixture(autouse=True)
def _account(cloud: Cloud, only_aws: None) -> None:
    """The images and the role that the deployments name."""
    version = importlib.metadata.version("lmi-handler")
    cloud.push("lmi-handler", version)
    cloud.push("lmi-handler-llamacpp", version)
    cloud.push("lmi-handler-llamacpp", f"{version}-cu130")
    trust = {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}
    document = json.dumps({"Version": "2012-10-17", "Statement": [trust]})
    cloud.client("iam").create_role(RoleName="model", AssumeRolePolicyDocument=document)
    cloud.calls.clear()


@pytest.fixture
def quotas() -> dict[str, float]:
    return {"ml.g5.2xlarge for endpoint usage": 8.0}
