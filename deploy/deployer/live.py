"""Find a deployment's existing resources in AWS, without changing anything.

Resources are looked up by their desired names. Alarms and older versions of models and configurations are looked up by
name prefix, and components and scaling are looked up by endpoint. Tags show whether the deployment owns a resource.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from botocore.exceptions import ClientError

from deploy.aws import Aws, components_of, is_denied, pages, unless_missing, variants_of
from deploy.deployer.calls import CALLS, Identity, identity, identity_of, show, tags_of
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
        description: AWS's description of the resource.
        tags: tags of the resource or, for a scaling policy, the tags of its scalable target.
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
    def key(self) -> str:
        return f"{self.kind.value}/{self.name}"

    @property
    def status(self) -> str:
        """Return the status that AWS reports, or `InService` for kinds that have no status."""
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
        resources: resources that the deployment owns or that have a desired name. The endpoint and its configuration
            are included even if they belong to another owner.
        online: whether AWS was queried. If it was not, no existing resources are known.
        foreign_components: components on the same endpoint that the deployment does not own, including adapters.
        foreign_scaling: scalable targets of the endpoint and its components that the deployment does not own, and
            policies of these and of its own targets that it does not own.
    """

    deployment: str
    resources: tuple[LiveResource, ...] = ()
    online: bool = True
    foreign_components: tuple[LiveResource, ...] = ()
    foreign_scaling: tuple[LiveResource, ...] = ()

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
        """Return the deployment's resources that cannot be updated now because AWS is still changing them."""
        shared = self.of(Kind.ENDPOINT) if is_guest(self.deployment) else ()  # guests wait for the endpoint
        return tuple(item for item in (*self.owned, *shared, *self._beside) if item.busy)

    @property
    def _beside(self) -> tuple[LiveResource, ...]:
        """Return another owner's endpoint that is being updated to or from the deployment's shadow configuration."""
        endpoint = self.endpoint
        if endpoint is None or endpoint.is_of(self.deployment) or is_guest(self.deployment):
            return ()
        config_names = {item.name for item in self.owned if item.kind is Kind.ENDPOINT_CONFIG}
        configs = {endpoint.description["EndpointConfigName"], *pending_configs(endpoint.description)}
        return (endpoint,) if config_names & configs else ()

    @property
    def config(self) -> LiveResource | None:
        """Return the endpoint's current configuration, or None if it is unknown."""
        endpoint = self.endpoint
        name = None if endpoint is None else endpoint.description.get("EndpointConfigName")
        return None if name is None else self.get(Kind.ENDPOINT_CONFIG, (str(name),))

    @property
    def variants(self) -> list[Json]:
        """Return the production variants of the endpoint's current configuration, or [] if it is unknown."""
        return [] if self.config is None else list(self.config.description["ProductionVariants"])


def pending_configs(endpoint: Json) -> tuple[str, ...]:
    """Return the name of the configuration that an endpoint is being updated to, or () if there is no update."""
    name = endpoint.get("PendingDeploymentSummary", {}).get("EndpointConfigName")
    return () if name is None else (str(name),)


_SCALING = CALLS[Kind.SCALABLE_TARGET].service
_SAGEMAKER = {"ServiceNamespace": "sagemaker"}


def look(aws: Aws, deployment: str, desired: Sequence[Resource] = ()) -> Live:
    """Find the existing resources. Resources with the deployment's name prefix but without its tag are omitted."""
    search = _Search(aws, deployment, desired)
    search.find_by_name()
    search.find_served()
    search.find_alarms()
    search.find_scaling()
    return search.result()


class _Search:
    """A search for the existing resources of a deployment that reads each resource only once.

    Args:
        desired: desired resources.
    """

    def __init__(self, aws: Aws, deployment: str, desired: Sequence[Resource]) -> None:
        self._aws, self._deployment = aws, deployment
        self._own_name, self._endpoint = name_and_endpoint(deployment)
        self._desired = [(item.kind, identity_of(item)) for item in desired]
        self._served: set[tuple[Kind, Identity]] = set()
        self._existing: dict[tuple[Kind, Identity], LiveResource] = {}

    def result(self) -> Live:
        names = {*self._desired, *self._served, (Kind.ENDPOINT, (self._endpoint,))}
        existing = self._existing.values()
        related = [item for item in existing if (item.kind, item.which) in names or item.is_of(self._deployment)]
        foreign = [item for item in existing if item not in related]
        return Live(
            self._deployment,
            tuple(related),
            foreign_components=tuple(item for item in foreign if item.kind is Kind.COMPONENT),
            foreign_scaling=tuple(item for item in foreign if item.kind in (Kind.SCALABLE_TARGET, Kind.SCALING_POLICY)),
        )

    def find_by_name(self) -> None:
        """Look up all desired resources except for scaling, and other resources that may belong to the deployment."""
        desired = (key for key in self._desired if key[0] not in (Kind.SCALABLE_TARGET, Kind.SCALING_POLICY))
        candidates = ((kind, (name,)) for kind, name in _candidates(self._aws, self._own_name, self._endpoint))
        for kind, which in chain(desired, candidates):
            if (kind, which) not in self._existing:
                self._keep(kind, show(self._aws, kind, which))

    def find_served(self) -> None:
        """Find the configuration of another owner's endpoint, if it may be read, and the models in it."""
        endpoint = self._existing.get((Kind.ENDPOINT, (self._endpoint,)))
        if endpoint is None or endpoint.is_of(self._deployment):
            return
        try:
            for kind, description in self._of_another_owner(endpoint):
                self._served.add((kind, identity(kind, description)))
                self._keep(kind, description, {})
        except ClientError as error:
            if not is_denied(error):
                raise

    def _of_another_owner(self, endpoint: LiveResource) -> Iterator[tuple[Kind, Json]]:
        """Yield another owner's configuration and its models, and the configuration before the deployment's shadow.

        If the deployment is a guest on the endpoint, the models are omitted.
        """
        config = show(self._aws, Kind.ENDPOINT_CONFIG, (str(endpoint.description["EndpointConfigName"]),))
        if config is None:
            return
        yield Kind.ENDPOINT_CONFIG, config
        live_config = self._existing.get((Kind.ENDPOINT_CONFIG, identity(Kind.ENDPOINT_CONFIG, config)))
        if live_config is not None and (before := live_config.tags.get(TAG_BEFORE)) is not None:
            yield from _before(self._aws, before)
        if is_guest(self._deployment):
            return
        parts = [*config.get("ProductionVariants", ()), *self._specifications()]
        for name in dict.fromkeys(str(part["ModelName"]) for part in parts if "ModelName" in part):
            if (model := show(self._aws, Kind.MODEL, (name,))) is not None:
                yield Kind.MODEL, model

    def _specifications(self) -> list[Json]:
        """Return the specifications of all components on the endpoint."""
        components = [item.description for item in self._existing.values() if item.kind is Kind.COMPONENT]
        return [specification for component in components for specification in specifications(component)]

    def find_alarms(self) -> None:
        """Find the alarms by name, because after a killed run, an alarm may exist without its component."""
        owned = {"AlarmTypes": ["MetricAlarm"], "AlarmNamePrefix": scoped_name(self._own_name, "")}
        for alarm in pages(self._aws, "cloudwatch", "describe_alarms", "MetricAlarms", **owned):
            self._keep(Kind.ALARM, alarm)

    def find_scaling(self) -> None:
        """Find the scalable targets and policies of the endpoint and of components, including deleted components."""
        for target in pages(self._aws, _SCALING, "describe_scalable_targets", "ScalableTargets", **_SAGEMAKER):
            resource_id = target["ResourceId"]
            is_desired = (Kind.SCALABLE_TARGET, identity(Kind.SCALABLE_TARGET, target)) in self._desired
            on_endpoint = resource_id.startswith(f"endpoint/{self._endpoint}/")
            if not is_desired and not on_endpoint and not resource_id.startswith("inference-component/"):
                continue
            if (tags := _tags(self._aws, Kind.SCALABLE_TARGET, target)) is None:
                continue
            is_ours = is_desired or tags.get(TAG_DEPLOYMENT) == self._deployment
            if is_ours or on_endpoint or resource_id in {item.key for item in self._existing.values()}:
                self._keep(Kind.SCALABLE_TARGET, target, tags)
            if is_ours or on_endpoint:
                self._find_policies(target, tags)

    def _find_policies(self, target: Json, tags: Mapping[str, str]) -> None:
        which = {name: target[name] for name in CALLS[Kind.SCALABLE_TARGET].identity}
        for policy in pages(self._aws, _SCALING, "describe_scaling_policies", "ScalingPolicies", **which):
            # A policy that a user added must not be updated. It is deleted only with its target.
            is_ours = policy["PolicyName"].startswith(scoped_name(self._own_name, ""))
            self._keep(Kind.SCALING_POLICY, policy, tags if is_ours else {})

    def _keep(self, kind: Kind, description: Json | None, tags: Mapping[str, str] | None = None) -> None:
        """Add a resource, unless it does not exist or is already known. If `tags` is None, they are read from AWS."""
        if description is None or (key := (kind, identity(kind, description))) in self._existing:
            return
        tags = _tags(self._aws, kind, description) if tags is None else tags
        if tags is not None:
            self._existing[key] = LiveResource(kind, description, tags)


def _tags(aws: Aws, kind: Kind, description: Json) -> Mapping[str, str] | None:
    """Return the tags of a resource, or None if it was deleted in the meantime."""
    return unless_missing(lambda: tags_of(aws, kind, description))


def _before(aws: Aws, name: str) -> Iterator[tuple[Kind, Json]]:
    """Yield the configuration in use before the shadow, if it exists, or only its name if reading it is denied."""
    try:
        config = show(aws, Kind.ENDPOINT_CONFIG, (name,))
    except ClientError as error:
        if not is_denied(error):
            raise
        config = {"EndpointConfigName": name}
    if config is not None:
        yield Kind.ENDPOINT_CONFIG, config


def _candidates(aws: Aws, deployment: str, endpoint: str) -> Iterator[tuple[Kind, str]]:
    """Yield the models, configurations, endpoint and components that may belong to the deployment, by their names.

    Tags are not sufficient for this, as a user may have copied them to another resource.
    """
    for kind, operation, listed, versions in (
        (Kind.MODEL, "list_models", "Models", (deployment, batch_name(deployment))),
        (Kind.ENDPOINT_CONFIG, "list_endpoint_configs", "EndpointConfigs", (deployment,)),
    ):
        prefix = batch_name(deployment).removesuffix("-batch")
        for item in pages(aws, "sagemaker", operation, listed, NameContains=prefix):
            name = item[CALLS[kind].identity[-1]]
            if any(is_version_of(version, name) for version in versions):
                yield kind, name
    yield Kind.ENDPOINT, endpoint
    for name in components_of(aws, endpoint):
        yield Kind.COMPONENT, name


# -- versions of models and endpoint configurations, which AWS cannot change -------------------------------------------


def current_version(resource: Resource, live: Live, desired: Sequence[Resource] = ()) -> LiveResource | None:
    """Return the version of a model or configuration that is in use now, or None if there is none.

    Args:
        desired: all desired resources, including the components that will use a model.
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
    """Return the versions to delete: all but the `keep` newest configurations, and unused models.

    Serving and desired versions are always kept. While two versions serve side by side, no version is outdated, because
    AWS names only one of the two. A version that a killed run created is also counted.
    With components, the newest unused models are also kept, in the number that `keep - 1` versions have.
    """
    if live.endpoint is not None and live.endpoint.mixed:
        return []
    configs = _newest(item for item in live.owned if item.kind is Kind.ENDPOINT_CONFIG)
    retained = _retained_configs(configs, desired, live, keep)
    models = _unused_models(retained, desired, live)
    if any(item.kind is Kind.COMPONENT for item in desired):  # components name the models, and configurations do not
        of_version = sum(item.kind is Kind.MODEL for item in desired)
        models = models[max(keep - 1, 0) * of_version :]
    return [*(item for item in configs if item not in retained), *models]


def _retained_configs(
    configs: Sequence[LiveResource], desired: Sequence[Resource], live: Live, keep: int
) -> list[LiveResource]:
    """Return the desired configurations and, up to `keep` in total, the serving and the newest other configurations."""
    names = {item.name for item in desired if item.kind is Kind.ENDPOINT_CONFIG}
    serving = None if live.endpoint is None else live.endpoint.description["EndpointConfigName"]
    # The serving version is kept first, as a rollback returns to it.
    candidates = sorted((item for item in configs if item.name not in names), key=lambda item: item.name != serving)
    return [*(item for item in configs if item.name in names), *candidates[: max(keep - len(names), 0)]]


def _unused_models(configs: Sequence[LiveResource], desired: Sequence[Resource], live: Live) -> list[LiveResource]:
    """Return the models, newest first, that are neither desired nor in any of the configurations.

    Models of components are not considered used, because components are changed or deleted before any model.
    """
    used = {item.name for item in desired if item.kind is Kind.MODEL} | set(
        _models(item.description for item in configs)
    )
    batch = batch_name(live.deployment)  # jobs may use its models, which are deleted only with the deployment
    models = (item for item in live.owned if item.kind is Kind.MODEL and item.name not in used)
    return _newest(item for item in models if not is_version_of(batch, item.name))


def _newest(resources: Iterable[LiveResource]) -> list[LiveResource]:
    return sorted(resources, key=lambda item: (item.description["CreationTime"], item.name), reverse=True)


def _models(configs: Iterable[Json]) -> list[str]:
    variants = [variant for config in configs for variant in variants_of(config)]
    names = [item["ModelName"] for item in variants if "ModelName" in item]
    pools = [pool for item in variants for pool in item.get("InstancePools", ())]
    return [*names, *(pool["ModelNameOverride"] for pool in pools if "ModelNameOverride" in pool)]


def _component_models(live: Live, names: Sequence[str]) -> list[str]:
    components = [item for item in live.of(Kind.COMPONENT) if item.name in names]
    every = [specification for item in components for specification in specifications(item.description)]
    return [str(item["ModelName"]) for item in every if "ModelName" in item]
