"""What there is of a deployment in AWS, whoever made it and however far they got: one look, without any change.

It is found by name (what the specification wants), by the deployment's name at the beginning (older versions of its
model and configuration) and by where it belongs (components, scaling and alarms of the endpoint). Whether it is ours,
its tag says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from deploy.aws import Aws, is_missing
from deploy.deployer.calls import CALLS, Identity, identity, show, tags_of
from deploy.resources.names import TAG_DEPLOYMENT, beside, is_version_of, stem_of
from deploy.resources.resource import ENDED, FAILED, MIXED, READY, Json, Kind, Resource


@dataclass(frozen=True)
class LiveResource:
    """One thing that exists.

    Attributes:
        said: what AWS says of it.
        tags: its own; a policy has those of its scalable target.
    """

    kind: Kind
    said: Json
    tags: Mapping[str, str]

    @property
    def which(self) -> Identity:
        return identity(self.kind, self.said)

    @property
    def name(self) -> str:
        return self.which[-1]

    @property
    def status(self) -> str:
        """`InService` where its kind has no states."""
        status = CALLS[self.kind].status
        return READY[0] if status is None else str(self.said[status])

    @property
    def failed(self) -> bool:
        return self.status in FAILED

    @property
    def busy(self) -> bool:
        return self.status not in ENDED

    @property
    def mixed(self) -> bool:
        return self.status in MIXED

    def is_of(self, deployment: str) -> bool:
        return self.tags.get(TAG_DEPLOYMENT) == deployment


@dataclass(frozen=True)
class Live:
    """All of a deployment.

    Attributes:
        deployment: its name.
        things: those that are ours, and those that bear a wanted name; the endpoint of its name, whosever it is.
        asked: False: AWS could not be asked, and nothing is known.
    """

    deployment: str
    things: tuple[LiveResource, ...] = ()
    asked: bool = True

    def get(self, kind: Kind, which: Identity) -> LiveResource | None:
        return next((one for one in self.things if one.kind is kind and one.which == which), None)

    def of(self, *kinds: Kind) -> tuple[LiveResource, ...]:
        return tuple(one for one in self.things if one.kind in kinds)

    @property
    def ours(self) -> tuple[LiveResource, ...]:
        return tuple(one for one in self.things if one.is_of(self.deployment))

    @property
    def endpoint(self) -> LiveResource | None:
        return next(iter(self.of(Kind.ENDPOINT)), None)

    @property
    def busy(self) -> tuple[LiveResource, ...]:
        """Ours that AWS is still at: nothing can be done to them now."""
        return tuple(one for one in self.ours if one.busy)


def look(aws: Aws, deployment: str, wanted: Sequence[Resource] = ()) -> Live:
    """What exists of it. Things that only share a name's beginning, without our tag, are left out."""
    found: dict[tuple[Kind, Identity], LiveResource] = {}

    def keep(kind: Kind, said: Json | None, tags: Mapping[str, str] | None = None) -> None:
        if said is not None and (kind, identity(kind, said)) not in found:
            tags = _tags(aws, kind, said) if tags is None else tags
            if tags is not None:
                found[kind, identity(kind, said)] = LiveResource(kind, said, tags)

    for kind, which in ((one.kind, identity(one.kind, one.request)) for one in wanted):
        if kind not in (Kind.SCALABLE_TARGET, Kind.SCALING_POLICY):
            keep(kind, show(aws, kind, which))
    for kind, name in _candidates(aws, deployment):
        if (kind, (name,)) not in found:
            keep(kind, show(aws, kind, (name,)))
    # By its name: a killed run may have left a component's alarm without its component.
    ours = {"AlarmTypes": ["MetricAlarm"], "AlarmNamePrefix": beside(deployment, "")}
    for alarm in _pages(aws, "cloudwatch", "describe_alarms", "MetricAlarms", **ours):
        keep(Kind.ALARM, alarm)
    targets = [one for one in wanted if one.kind is Kind.SCALABLE_TARGET]
    _scaling(aws, deployment, found, targets)
    names = {(one.kind, identity(one.kind, one.request)) for one in wanted} | {(Kind.ENDPOINT, (deployment,))}
    return Live(deployment, tuple(one for key, one in found.items() if key in names or one.is_of(deployment)))


def _candidates(aws: Aws, deployment: str) -> Iterator[tuple[Kind, str]]:
    """What may be ours by its name or its place: all versions of models and configurations, endpoint, components.

    A tag alone makes nothing ours: it may have been copied by hand to a thing of another name.
    """
    for kind, operation, listed in (
        (Kind.MODEL, "list_models", "Models"),
        (Kind.ENDPOINT_CONFIG, "list_endpoint_configs", "EndpointConfigs"),
    ):
        for one in _pages(aws, "sagemaker", operation, listed, NameContains=stem_of(deployment)):
            name = one[CALLS[kind].identity[-1]]
            if is_version_of(deployment, name):
                yield kind, name
    yield Kind.ENDPOINT, deployment
    for one in _pages(
        aws, "sagemaker", "list_inference_components", "InferenceComponents", EndpointNameEquals=deployment
    ):
        yield Kind.COMPONENT, one["InferenceComponentName"]


def _tags(aws: Aws, kind: Kind, said: Json) -> Mapping[str, str] | None:
    """Its tags; None: it has gone since it was shown."""
    try:
        return tags_of(aws, kind, said)
    except ClientError as error:
        if is_missing(error):
            return None
        raise


def _scaling(
    aws: Aws, deployment: str, found: dict[tuple[Kind, Identity], LiveResource], wanted: Iterable[Resource]
) -> None:
    """The endpoint's scalable targets and those of components (which they outlive) with our tag; their policies."""
    own = {identity(one.kind, one.request) for one in wanted}
    variants = f"endpoint/{deployment}/"
    for target in _pages(
        aws, "application-autoscaling", "describe_scalable_targets", "ScalableTargets", ServiceNamespace="sagemaker"
    ):
        which = identity(Kind.SCALABLE_TARGET, target)
        if which not in own and not target["ResourceId"].startswith((variants, "inference-component/")):
            continue
        tags = _tags(aws, Kind.SCALABLE_TARGET, target)
        if tags is None or (which not in own and tags.get(TAG_DEPLOYMENT) != deployment):
            continue
        found[Kind.SCALABLE_TARGET, which] = LiveResource(Kind.SCALABLE_TARGET, target, tags)
        where = {name: target[name] for name in CALLS[Kind.SCALABLE_TARGET].identity}
        for policy in _pages(aws, "application-autoscaling", "describe_scaling_policies", "ScalingPolicies", **where):
            # One that somebody has put there by hand is not ours to change; it goes with its target only.
            whose = tags if policy["PolicyName"].startswith(beside(deployment, "")) else {}
            found[Kind.SCALING_POLICY, identity(Kind.SCALING_POLICY, policy)] = LiveResource(
                Kind.SCALING_POLICY, policy, whose
            )


def _pages(aws: Aws, service: str, operation: str, listed: str, **arguments: Any) -> Iterator[dict[str, Any]]:
    for page in aws.client(service).get_paginator(operation).paginate(**arguments):
        yield from page[listed]
