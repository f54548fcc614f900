"""CreateModel: the container, its environment, and the model data that SageMaker lays beside it."""

from __future__ import annotations

from typing import Any

from deploy.resolve.decision import Decision
from deploy.resources.environment import environment
from deploy.resources.names import versioned
from deploy.resources.resource import Kind, Resource
from deploy.spec import Spec


def model(spec: Spec, decision: Decision, tags: list[dict[str, str]], *, allow_plaintext_secret: bool) -> Resource:
    """One model for the endpoint, or for all of its components.

    The container's metrics need nothing said: SageMaker scrapes /metrics on 8080 by default (contract, section 1).
    """
    container: dict[str, Any] = {
        "Image": decision.image,
        "Environment": environment(spec, decision, allow_plaintext_secret=allow_plaintext_secret),
    }
    if decision.model_data is not None:
        container["ModelDataSource"] = {
            "S3DataSource": {"S3Uri": decision.model_data, "S3DataType": "S3Prefix", "CompressionType": "None"}
        }
    content: dict[str, Any] = {"PrimaryContainer": container, "ExecutionRoleArn": spec.role}
    if not spec.components:  # an endpoint with components says it in its configuration, for all of them
        content |= isolation(spec)
    name = versioned(spec.name, content)
    return Resource(Kind.MODEL, name, {"ModelName": name, **content, "Tags": tags})


def isolation(spec: Spec) -> dict[str, Any]:
    """The network's part of a model or an endpoint configuration."""
    said: dict[str, Any] = {}
    if spec.network.subnets:
        said["VpcConfig"] = {
            "SecurityGroupIds": list(spec.network.security_groups),
            "Subnets": list(spec.network.subnets),
        }
    if spec.network.isolated:
        said["EnableNetworkIsolation"] = True
    return said
