"""CreateEndpoint, and UpdateEndpoint with how it goes about it."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.resolve.decision import Decision
from deploy.resources.resource import Kind, Resource
from deploy.resources.updating import endpoint_deployment
from deploy.spec import Spec


def endpoint(
    spec: Spec, decision: Decision, config: Resource, alarms: Sequence[Resource], tags: list[dict[str, str]]
) -> Resource:
    """Args: alarms: those that roll an update back; they must be there when one begins."""
    scaled = spec.scaling is not None or spec.instance.managed is not None
    return Resource(
        Kind.ENDPOINT,
        spec.name,
        {"EndpointName": spec.name, "EndpointConfigName": config.name, "Tags": tags},
        needs=(config.key, *(alarm.key for alarm in alarms)),
        update={
            "EndpointName": spec.name,
            "EndpointConfigName": config.name,
            # As many instances as scaling has come to; else what the specification says now.
            "RetainAllVariantProperties": scaled,
            "DeploymentConfig": endpoint_deployment(spec, decision, alarms),
        },
    )
