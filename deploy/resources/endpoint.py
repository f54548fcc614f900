"""Build the endpoint (CreateEndpoint), and its update (UpdateEndpoint)."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.resolve.decision import Decision
from deploy.resources.passthrough import merged
from deploy.resources.resource import Kind, Resource
from deploy.resources.updating import endpoint_deployment
from deploy.spec import Spec


def endpoint(
    spec: Spec, decision: Decision, config: Resource, alarms: Sequence[Resource], tags: list[dict[str, str]]
) -> Resource:
    """Build the endpoint.

    Args:
        alarms: they trigger the rollback of an update, and must exist before it.
    """
    scaled = spec.scaling is not None or spec.instance.managed is not None
    return Resource(
        Kind.ENDPOINT,
        spec.name,
        {"EndpointName": spec.name, "EndpointConfigName": config.name, "Tags": tags},
        needs=(config.key, *(alarm.key for alarm in alarms)),
        update=merged(
            {
                "EndpointName": spec.name,
                "EndpointConfigName": config.name,
                # Keep the number of instances that scaling has reached; otherwise the specification decides.
                "RetainAllVariantProperties": scaled,
                "DeploymentConfig": endpoint_deployment(spec, decision, alarms),
            },
            spec.sagemaker.endpoint,
        ),
    )
