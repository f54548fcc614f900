"""Find the variants that an update must deregister from automatic scaling, and what to register again afterwards.

AWS refuses an update of an endpoint that removes a registered variant or changes its instance type. AWS's guide
says to deregister the variant, update the endpoint, and register the variant again. Deregistering also deletes the
variant's policies, so they are created again, and so are the alarms that trigger them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deploy.deployer.calls import CALLS, identity_of
from deploy.deployer.live import Live, LiveResource
from deploy.resources.resource import Json, Kind, Ref, Resource
from deploy.service_model import service

_INPUTS = {
    Kind.SCALABLE_TARGET: "RegisterScalableTarget",
    Kind.SCALING_POLICY: "PutScalingPolicy",
    Kind.ALARM: "PutMetricAlarm",
}
_OMITTED = ("RoleARN", "Tags")
"""Fields that are not copied: SageMaker always uses its service-linked role, and descriptions do not contain tags."""


def to_deregister(desired: Sequence[Resource], live: Live) -> list[LiveResource]:
    """Return the scalable targets, of any owner, of variants that the update changes as AWS refuses it.

    If the current configuration is unknown, all of the endpoint's targets are returned.

    Args:
        desired: desired resources, with the endpoint and its configuration.
    """
    endpoint, config = live.endpoint, _new_config(desired, live)
    if endpoint is None or config is None:
        return []
    before, after = _types(live.variants), _types(config["ProductionVariants"])
    targets = [item for item in (*live.resources, *live.foreign_scaling) if item.kind is Kind.SCALABLE_TARGET]
    return [
        target
        for target in targets
        if (variant := _variant(target, endpoint.name)) is not None
        and (variant not in before or before[variant] != after.get(variant))
    ]


def policies_of(target: LiveResource, live: Live) -> list[LiveResource]:
    """Return the policies of a scalable target, of any owner."""
    policies = (item for item in (*live.resources, *live.foreign_scaling) if item.kind is Kind.SCALING_POLICY)
    return [policy for policy in policies if policy.which[:-1] == target.which]


def copies(target: LiveResource, live: Live) -> tuple[Resource, ...]:
    """Return resources that recreate a scalable target, its policies, and the deployment's alarms that trigger them."""
    policies = policies_of(target, live)
    arns = {policy.description[CALLS[policy.kind].arn]: policy.key for policy in policies}
    alarms = [alarm for alarm in live.of(Kind.ALARM) if arns.keys() & set(alarm.description.get("AlarmActions", ()))]
    return tuple(_copy(item, arns) for item in (target, *policies, *alarms))


def lost(target: LiveResource, desired: Sequence[Resource], live: Live) -> tuple[Resource, ...]:
    """Return resources that recreate what the deployment does not own: a deregistered target, and its policies.

    The desired target and policies are omitted. If the variant no longer exists, nothing is recreated.
    """
    config = _new_config(desired, live)
    variants = () if config is None else config["ProductionVariants"]
    if target.name.rpartition("/")[2] not in _types(variants):
        return ()
    desired_keys = {(item.kind, identity_of(item)) for item in desired}
    foreign = [item for item in (target, *policies_of(target, live)) if not item.is_of(live.deployment)]
    is_recreated = (target.kind, target.which) in desired_keys or target in foreign
    return tuple(_copy(item, {}) for item in foreign if is_recreated and (item.kind, item.which) not in desired_keys)


def _new_config(desired: Sequence[Resource], live: Live) -> Json | None:
    """Return the desired configuration if it replaces the current configuration, or None."""
    endpoint = live.endpoint
    configs = [item for item in desired if item.kind is Kind.ENDPOINT_CONFIG]
    if endpoint is None or not configs or configs[0].name == endpoint.description.get("EndpointConfigName"):
        return None
    return configs[0].request


def _types(variants: Sequence[Json]) -> dict[str, list[str]]:
    """Return the instance types of each variant, by the variant's name."""
    return {str(variant["VariantName"]): sorted(_types_of(variant)) for variant in variants}


def _types_of(variant: Json) -> Iterator[str]:
    if "InstanceType" in variant:
        yield str(variant["InstanceType"])
    for pool in variant.get("InstancePools", ()):
        yield str(pool["InstanceType"])


def _variant(target: LiveResource, endpoint: str) -> str | None:
    """Return the name of the variant that a target scales, or None if it scales something else."""
    head = f"endpoint/{endpoint}/variant/"
    return target.name.removeprefix(head) if target.name.startswith(head) else None


def _copy(item: LiveResource, arns: Mapping[str, str]) -> Resource:
    """Return the resource that creates `item` again, with references in place of the ARNs of its policies."""
    fields = service(CALLS[item.kind].service).operation_model(_INPUTS[item.kind]).input_shape.members
    request: dict[str, Any] = {
        name: value for name, value in item.description.items() if name in fields and name not in _OMITTED
    }
    if "AlarmActions" in request:
        actions = request["AlarmActions"]
        request["AlarmActions"] = [Ref(arns[arn], "PolicyARN") if arn in arns else arn for arn in actions]
    tags = {name: value for name, value in item.tags.items() if not name.startswith("aws:")}
    if item.kind is Kind.SCALABLE_TARGET and tags:
        request["Tags"] = tags
    return Resource(item.kind, item.name, request)
