"""Find a deployment's existing resources in AWS, without changing anything.

Resources are found by their desired names, older versions of models and configurations by the deployment's name as
their prefix, and components, scaling and alarms by their endpoint. Tags tell whether the deployment owns a resource.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from botocore.exceptions import ClientError

from deploy.aws import Aws, components_of, is_denied, pages, unless_missing
from deploy.deployer.calls import CALLS, Identity, identity, show, tags_of
from deploy.resources.resource import (
    ENDED,
    FAILED,
    MIXED,
    READY,
    TAG_BEFORE,
    TAG_DEPLOYMENT,
    Json,
    Kind,
    Resource,
    batch_name,
    is_version_of,
    scoped_name,
    specifications,
)
from deploy.spec.components import is_guest, name_and_endpoint


@dataclass(frozen=True)
class LiveResource:
    """A resource that exists in AWS.

    Attributes:
        kind: kind of the resource.
        description: the description of the resource.
        tags: tags of the resource, or for a scaling policy those of its scalable target.
    """

    kind: Kind
    description: Json
    tags: Mapping[str, str]

    @property
    def which(self) -> Identity:
        return identity(self.kind, self.description)

    @property
    def name(self) -> str:
        return self.which[-1]

    @property
    def status(self) -> str:
        """Return AWS's status, or `InService` for kinds that have no status."""
        status = CALLS[self.kind].status
        return READY[0] if status is None else str(self.description[status])

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
    """The existing resources of a deployment.

    Attributes:
        deployment: name of the deployment in tags (`resources/resource.py`).
        resources: resources that the deployment owns or that have a desired name. Also its endpoint with its
            configuration, even if another owner has them.
        online: whether AWS was queried. If not, nothing is known to exist.
        others: components on the same endpoint that the deployment does not own, including adapters.
        foreign_targets: scalable targets of the endpoint and its components that the deployment does not own.
    """

    deployment: str
    resources: tuple[LiveResource, ...] = ()
    online: bool = True
    others: tuple[LiveResource, ...] = ()
    foreign_targets: tuple[LiveResource, ...] = ()

    def get(self, kind: Kind, which: Identity) -> LiveResource | None:
        return next((item for item in self.resources if item.kind is kind and item.which == which), None)

    def of(self, *kinds: Kind) -> tuple[LiveResource, ...]:
        return tuple(item for item in self.resources if item.kind in kinds)

    @property
    def owned(self) -> tuple[LiveResource, ...]:
        return tuple(item for item in self.resources if item.is_of(self.deployment))

    @property
    def endpoint(self) -> LiveResource | None:
        return next(iter(self.of(Kind.ENDPOINT)), None)

    @property
    def busy(self) -> tuple[LiveResource, ...]:
        """Return the deployment's resources that AWS is still changing, so that they cannot be updated now."""
        shared = self.of(Kind.ENDPOINT) if is_guest(self.deployment) else ()  # a guest's components wait for it
        return tuple(item for item in (*self.owned, *shared, *self._beside) if item.busy)

    @property
    def _beside(self) -> tuple[LiveResource, ...]:
        """Return another owner's endpoint that is being updated to or from the deployment's shadow configuration."""
        endpoint = self.endpoint
        if endpoint is None or endpoint.is_of(self.deployment) or is_guest(self.deployment):
            return ()
        own = {item.name for item in self.owned if item.kind is Kind.ENDPOINT_CONFIG}
        configs = {endpoint.description["EndpointConfigName"], *pending_configs(endpoint.description)}
        return (endpoint,) if own & configs else ()

    @property
    def config(self) -> LiveResource | None:
        """Return the endpoint's current configuration."""
        endpoint = self.endpoint
        name = None if endpoint is None else endpoint.description.get("EndpointConfigName")
        return None if name is None else self.get(Kind.ENDPOINT_CONFIG, (str(name),))


def pending_configs(endpoint: Json) -> tuple[str, ...]:
    """Return the name of the configuration that an endpoint is being updated to, or () if there is no update."""
    name = endpoint.get("PendingDeploymentSummary", {}).get("EndpointConfigName")
    return () if name is None else (str(name),)


def look(aws: Aws, deployment: str, desired: Sequence[Resource] = ()) -> Live:
    """Find the existing resources. Resources with only the same name prefix, but without the tag, are left out."""
    existing: dict[tuple[Kind, Identity], LiveResource] = {}

    def keep(kind: Kind, description: Json | None, tags: Mapping[str, str] | None = None) -> None:
        if description is not None and (kind, identity(kind, description)) not in existing:
            tags = _tags(aws, kind, description) if tags is None else tags
            if tags is not None:
                existing[kind, identity(kind, description)] = LiveResource(kind, description, tags)

    for kind, which in ((item.kind, identity(item.kind, item.request)) for item in desired):
        if kind not in (Kind.SCALABLE_TARGET, Kind.SCALING_POLICY):
            keep(kind, show(aws, kind, which))
    own_name, endpoint = name_and_endpoint(deployment)
    for kind, name in _candidates(aws, own_name, endpoint):
        if (kind, (name,)) not in existing:
            keep(kind, show(aws, kind, (name,)))
    served = [*_of_another_owner(aws, existing, deployment, endpoint)]
    for kind, description in served:
        keep(kind, description, {})
    # Found by name, as a killed run may have left a component's alarm without the component.
    owned = {"AlarmTypes": ["MetricAlarm"], "AlarmNamePrefix": scoped_name(own_name, "")}
    for alarm in pages(aws, "cloudwatch", "describe_alarms", "MetricAlarms", **owned):
        keep(Kind.ALARM, alarm)
    targets = [item for item in desired if item.kind is Kind.SCALABLE_TARGET]
    _scaling(aws, deployment, existing, targets)
    names = {(item.kind, identity(item.kind, item.request)) for item in desired} | {(Kind.ENDPOINT, (endpoint,))}
    names |= {(kind, identity(kind, description)) for kind, description in served}
    related = {key: item for key, item in existing.items() if key in names or item.is_of(deployment)}
    rest = [item for key, item in existing.items() if key not in related]
    others = tuple(item for item in rest if item.kind is Kind.COMPONENT)
    foreign = tuple(item for item in rest if item.kind is Kind.SCALABLE_TARGET)
    return Live(deployment, tuple(related.values()), others=others, foreign_targets=foreign)


def _of_another_owner(
    aws: Aws, existing: Mapping[tuple[Kind, Identity], LiveResource], deployment: str, endpoint: str
) -> Iterator[tuple[Kind, Json]]:
    """Yield the current configuration of another owner's endpoint, if it may be read, and the models in it.

    The models are not read for a guest on that endpoint.
    """
    there = existing.get((Kind.ENDPOINT, (endpoint,)))
    if there is None or there.is_of(deployment):
        return
    try:
        config = show(aws, Kind.ENDPOINT_CONFIG, (str(there.description["EndpointConfigName"]),))
        if config is None:
            return
        yield Kind.ENDPOINT_CONFIG, config
        own = existing.get((Kind.ENDPOINT_CONFIG, (str(config["EndpointConfigName"]),)))
        if own is not None and (before := own.tags.get(TAG_BEFORE)) is not None:
            yield from _before(aws, before)
        if is_guest(deployment):
            return
        components = [item.description for item in existing.values() if item.kind is Kind.COMPONENT]
        parts = [*config.get("ProductionVariants", ()), *(part for item in components for part in specifications(item))]
        for name in dict.fromkeys(str(part["ModelName"]) for part in parts if "ModelName" in part):
            if (model := show(aws, Kind.MODEL, (name,))) is not None:
                yield Kind.MODEL, model
    except ClientError as error:
        if not is_denied(error):
            raise


def _before(aws: Aws, name: str) -> Iterator[tuple[Kind, Json]]:
    """Yield the configuration that served before the shadow, if it exists, or only its name if reading is denied."""
    try:
        config = show(aws, Kind.ENDPOINT_CONFIG, (name,))
    except ClientError as error:
        if not is_denied(error):
            raise
        config = {"EndpointConfigName": name}
    if config is not None:
        yield Kind.ENDPOINT_CONFIG, config


def _candidates(aws: Aws, deployment: str, endpoint: str) -> Iterator[tuple[Kind, str]]:
    """Yield the models, configurations, endpoint and components that may belong to the deployment, judging by names.

    Tags are not sufficient for that, as a user may have copied them to another resource.
    """
    for kind, operation, listed, versions in (
        (Kind.MODEL, "list_models", "Models", (deployment, batch_name(deployment))),
        (Kind.ENDPOINT_CONFIG, "list_endpoint_configs", "EndpointConfigs", (deployment,)),
    ):
        for item in pages(
            aws, "sagemaker", operation, listed, NameContains=batch_name(deployment).removesuffix("-batch")
        ):
            name = item[CALLS[kind].identity[-1]]
            if any(is_version_of(version, name) for version in versions):
                yield kind, name
    yield Kind.ENDPOINT, endpoint
    for name in components_of(aws, endpoint):
        yield Kind.COMPONENT, name


def _tags(aws: Aws, kind: Kind, description: Json) -> Mapping[str, str] | None:
    """Return the tags of a resource, or None if it was deleted in the meantime."""
    return unless_missing(lambda: tags_of(aws, kind, description))


def _scaling(
    aws: Aws, deployment: str, existing: dict[tuple[Kind, Identity], LiveResource], desired: Iterable[Resource]
) -> None:
    """Find the scalable targets of the endpoint and of components, which may be deleted already, and their policies."""
    desired_targets = {identity(item.kind, item.request) for item in desired}
    own_name, endpoint = name_and_endpoint(deployment)
    variants = f"endpoint/{endpoint}/"
    present = {f"inference-component/{item.name}" for item in existing.values() if item.kind is Kind.COMPONENT}
    for target in pages(
        aws, "application-autoscaling", "describe_scalable_targets", "ScalableTargets", ServiceNamespace="sagemaker"
    ):
        which = identity(Kind.SCALABLE_TARGET, target)
        if which not in desired_targets and not target["ResourceId"].startswith((variants, "inference-component/")):
            continue
        tags = _tags(aws, Kind.SCALABLE_TARGET, target)
        is_ours = which in desired_targets or (tags is not None and tags.get(TAG_DEPLOYMENT) == deployment)
        if tags is None or not (
            is_ours or target["ResourceId"].startswith(variants) or target["ResourceId"] in present
        ):
            continue
        existing[Kind.SCALABLE_TARGET, which] = LiveResource(Kind.SCALABLE_TARGET, target, tags)
        if not is_ours:
            continue
        where = {name: target[name] for name in CALLS[Kind.SCALABLE_TARGET].identity}
        for policy in pages(aws, "application-autoscaling", "describe_scaling_policies", "ScalingPolicies", **where):
            # A policy that a user added must not be updated. It is deleted only with its target.
            whose = tags if policy["PolicyName"].startswith(scoped_name(own_name, "")) else {}
            existing[Kind.SCALING_POLICY, identity(Kind.SCALING_POLICY, policy)] = LiveResource(
                Kind.SCALING_POLICY, policy, whose
            )


# -- versions of models and endpoint configurations, which AWS cannot change -------------------------------------------


def current_version(resource: Resource, live: Live, desired: Sequence[Resource] = ()) -> LiveResource | None:
    """Return the version of a model or configuration that is in use now, or None if there is none.

    Args:
        desired: all desired resources, among them the components that will use a model.
    """
    endpoint = live.endpoint
    if endpoint is None:
        return None
    config = live.config
    if resource.kind is Kind.ENDPOINT_CONFIG:
        return config
    if resource.kind is not Kind.MODEL:
        return None
    users = [item.name for item in desired if item.kind is Kind.COMPONENT and resource.key in item.needs]
    used_models = [*_models([config.description] if config is not None else []), *_component_models(live, users)]
    return next((existing for name in used_models if (existing := live.get(Kind.MODEL, (name,))) is not None), None)


def outdated(desired: Sequence[Resource], live: Live, keep: int) -> list[LiveResource]:
    """Return the versions to delete: all but the `keep` newest configurations, and models that no longer have a user.

    Serving and desired versions are always kept. While two versions serve side by side, none is outdated, as AWS names
    only one of the two. The version of a killed run counts too.
    """
    if live.endpoint is not None and live.endpoint.mixed:
        return []
    names = {(item.kind, item.name) for item in desired}
    serving = {str(live.endpoint.description["EndpointConfigName"])} if live.endpoint is not None else set()
    configs = _newest(item for item in live.owned if item.kind is Kind.ENDPOINT_CONFIG)
    current = [item for item in configs if (item.kind, item.name) in names]
    others = [item for item in configs if item not in current]
    # The serving version is kept first, as a rollback returns to it.
    others.sort(key=lambda item: item.name not in serving)
    coming = sum(item.kind is Kind.ENDPOINT_CONFIG for item in desired)
    retained = [*current, *others[: max(keep - coming, 0)]]
    removable = [item for item in configs if item not in retained]
    used_models = {name for kind, name in names if kind is Kind.MODEL}
    # Components are changed or deleted before any model.
    used_models |= set(_models(item.description for item in retained))
    batch = batch_name(live.deployment)  # jobs may use its models, which are deleted only with the deployment
    models = _newest(
        item
        for item in live.owned
        if item.kind is Kind.MODEL and item.name not in used_models and not is_version_of(batch, item.name)
    )
    if any(item.kind is Kind.COMPONENT for item in desired):  # components name the models, and configurations do not
        of_version = sum(item.kind is Kind.MODEL for item in desired)
        models = models[max(keep - 1, 0) * of_version :]
    return [*removable, *models]


def _newest(resources: Iterable[LiveResource]) -> list[LiveResource]:
    return sorted(resources, key=lambda item: (item.description["CreationTime"], item.name), reverse=True)


def _models(configs: Iterable[Json]) -> list[str]:
    variants = [
        item
        for config in configs
        for item in (*config["ProductionVariants"], *config.get("ShadowProductionVariants", ()))
    ]
    names = [item["ModelName"] for item in variants if "ModelName" in item]
    pools = [pool for item in variants for pool in item.get("InstancePools", ())]
    return [*names, *(pool["ModelNameOverride"] for pool in pools if "ModelNameOverride" in pool)]


def _component_models(live: Live, names: Sequence[str]) -> list[str]:
    components = [item for item in live.of(Kind.COMPONENT) if item.name in names]
    every = [specification for item in components for specification in specifications(item.description)]
    return [str(item["ModelName"]) for item in every if "ModelName" in item]
