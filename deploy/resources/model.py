"""Build the model (CreateModel): image, environment, model data."""

from __future__ import annotations

from typing import Any

from deploy.resolve.decision import Decision
from deploy.resources.environment import environment
from deploy.resources.names import version_name
from deploy.resources.passthrough import merged
from deploy.resources.resource import Kind, Resource
from deploy.spec import Spec


def model(spec: Spec, decision: Decision, tags: list[dict[str, str]], *, allow_plaintext_secret: bool) -> Resource:
    """Build the model of the endpoint, or of those of its components that share a server.

    Metrics need no setting: SageMaker scrapes /metrics on port 8080 by default.
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
    if not spec.components:  # with components the configuration holds them
        content |= isolation(spec)
    content = merged(content, spec.sagemaker.model)
    name = version_name(spec.name, content)
    return Resource(Kind.MODEL, name, {"ModelName": name, **content, "Tags": tags})


def isolation(spec: Spec) -> dict[str, Any]:
    """Return the network settings of a model or an endpoint configuration."""
    properties: dict[str, Any] = {}
    if spec.network.subnets:
        properties["VpcConfig"] = {
            "SecurityGroupIds": list(spec.network.security_groups),
            "Subnets": list(spec.network.subnets),
        }
    if spec.network.isolated:
        properties["EnableNetworkIsolation"] = True
    return properties
