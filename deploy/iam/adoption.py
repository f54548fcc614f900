"""What the deployer needs to take over an endpoint of another owner, or to put a shadow beside it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from deploy.iam.arns import Arns
from deploy.iam.statements import Statement, allow


def deployer(arns: Arns) -> Iterator[Statement]:
    """Its configuration and its models have names that only the endpoint tells."""
    configs = [arns.of("sagemaker", "endpoint-config/*")]
    # Of the endpoint too, which the deployer may update anyway: it goes back to what served before a shadow.
    yield allow("AdoptedConfig", ["sagemaker:DescribeEndpointConfig", "sagemaker:UpdateEndpoint"], configs)
    yield allow("AdoptedModel", ["sagemaker:DescribeModel"], [arns.of("sagemaker", "model/*")])
