"""Plan the calls that bring the resources in AWS to their desired state, without making any call.

Failed resources are deleted first, because AWS allows no other operation on them. Then resources are created and
updated in the order of the builders. Finally, resources that are no longer desired are deleted, in reverse order of
creation.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deploy.deployer.autoscaled import copies, lost, policies_of, to_deregister
from deploy.deployer.calls import CALLS, Identity, foreign, identity_of, removal, tagging
from deploy.deployer.live import Live, LiveResource, current_version, outdated
from deploy.errors import NotThere, Refused
from deploy.resources.resource import READY, Json, Kind, Ref, Resource, resolved, tag_map
from deploy.spec.components import is_guest, name_and_endpoint

# -- compare the desired state of a resource with AWS's description, field by field ------------------------------------
# Only desired fields are compared, as AWS adds defaults and further facts. A field that only AWS's description has is a
# difference only if omitting it from a request means "none".

_OPTIONAL = (
    "AcceleratorPartitionLayouts",
    "AcceleratorPartitionType",
    "AdditionalModelDataSources",
    "AsyncInferenceConfig",
    "AvailabilityZoneBalance",
    "CapacityReservationConfig",
    "ContainerMetricsConfig",
    "CoreDumpConfig",
    "CrossRegionTrafficConfig",
    "DataCaptureConfig",
    "EnableSSMAccess",
    "ExplainerConfig",
    "ImageConfig",
    "KmsKeyId",
    "MaxMemoryRequiredInMb",
    "ScaleInPolicy",
    "ShadowProductionVariants",
    "VpcConfig",
)
"""Fields without a default. If a specification no longer has such a field, the update removes the field."""

_NONE_IF_OMITTED = ("AlarmActions", "OKActions", "InsufficientDataActions", *_OPTIONAL)
_OF_ENDPOINT = ("EndpointName", "EndpointConfigName")
_WHOLE = ("Environment", "Tags")
"""Fields whose value is a map or a list to which AWS does not add entries."""


@dataclass(frozen=True)
class Difference:
    """A field whose value changes.

    Attributes:
        path: path of the field, such as `PrimaryContainer.Image`.
        before, after: values of the field, or None if it is absent.
    """

    path: str
    before: Any
    after: Any


def differences(before: Json, after: Json) -> tuple[Difference, ...]:
    """Return the changes from `before` to `after`."""
    return tuple(_differ("", before, after, whole=False))


def desired_fields(resource: Resource) -> dict[str, Any]:
    """Return the request fields to compare with `as_request`, omitting tags and settings of the update itself."""
    request = resource.request
    if resource.kind is Kind.COMPONENT and resource.update:
        request = resource.update
    if resource.kind is Kind.ENDPOINT:
        request = {name: request[name] for name in _OF_ENDPOINT}
    fields = {name: value for name, value in request.items() if name not in ("Tags", "DeploymentConfig")}
    if "Specifications" in fields:
        fields["Specifications"] = _by_type(fields["Specifications"])
    return fields


def as_request(kind: Kind, description: Json) -> dict[str, Any]:
    """Convert AWS's description to the fields of the request that creates the resource."""
    if kind is Kind.ENDPOINT:  # the other fields come from its configuration
        return {name: description.get(name) for name in _OF_ENDPOINT}
    fields = dict(description)
    if kind is Kind.COMPONENT:
        fields["RuntimeConfig"] = {"CopyCount": description.get("RuntimeConfig", {}).get("DesiredCopyCount")}
        fields["Specification"] = _specification(description.get("Specification", {}))
        fields["Specifications"] = _by_type([_specification(item) for item in description.get("Specifications", ())])
    return fields


def of_version(description: Json) -> dict[str, Any]:
    """Convert the description of a model or configuration to a request, with default routing and `PrimaryContainer`."""
    fields = dict(description)
    if "ProductionVariants" in fields:
        default = {"RoutingConfig": {"RoutingStrategy": "RANDOM"}}
        fields["ProductionVariants"] = [{**default, **variant} for variant in fields["ProductionVariants"]]
    if not fields.get("PrimaryContainer") and len(fields.get("Containers", ())) == 1:
        (fields["PrimaryContainer"],) = fields["Containers"]
    return fields


def _by_type(specifications: Sequence[Json]) -> list[Json]:
    """Sort the specifications of a component, which AWS may list in any order."""
    return sorted(specifications, key=lambda item: str(item.get("InstanceType")))


def _specification(description: Json) -> dict[str, Any]:
    fields = dict(description)
    if container := fields.get("Container"):
        image = container.get("DeployedImage", {}).get("SpecifiedImage")
        fields_of_request = {name: value for name, value in container.items() if name != "DeployedImage"}
        fields["Container"] = {**fields_of_request, **({"Image": image} if image is not None else {})}
    return fields


def _differ(path: str, before: Any, after: Any, *, whole: bool) -> Iterator[Difference]:
    if isinstance(after, Mapping) and isinstance(before, Mapping):
        for name, value in after.items():
            yield from _differ(f"{path}.{name}".lstrip("."), before.get(name), value, whole=name in _WHOLE)
        for name in before:
            if name not in after and (whole or name in _NONE_IF_OMITTED) and before[name]:
                yield Difference(f"{path}.{name}".lstrip("."), before[name], None)
    elif isinstance(after, list | tuple) and isinstance(before, list | tuple) and len(after) == len(before):
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from _differ(f"{path}[{number}]", old, new, whole=whole)
    elif before != after and not (_nothing(before) and _nothing(after)):
        yield Difference(path, before, after)


def _nothing(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping | list | tuple) and not value and not isinstance(value, Ref))


_REMOVAL = (
    Kind.SCALING_POLICY,
    Kind.SCALABLE_TARGET,
    Kind.ALARM,
    Kind.COMPONENT,
    Kind.ENDPOINT,
    Kind.ENDPOINT_CONFIG,
    Kind.MODEL,
)
"""The order of deletion, in which a resource comes after the kinds that use it."""


class Verb(enum.Enum):
    CREATE = "create"
    REPLACE = "replace"
    """Create a new version next to the old one, as AWS cannot update this kind."""
    UPDATE = "update"
    TAG = "tag"
    UNCHANGED = "unchanged"
    DELETE = "delete"


@dataclass(frozen=True)
class Action:
    """An action of a plan on one resource, usually a single call.

    Attributes:
        verb: kind of the action.
        kind: kind of the resource.
        which: identity of the resource.
        operation: boto3 method, such as `create_model`, or "" if the resource is unchanged.
        request: arguments of the call. The value of a `Ref` among them is known only once its resource exists.
        resource: desired resource, or None for a deletion.
        changes: fields that change.
        reason: reason for a deletion.
        expects: configuration that another owner's endpoint must still serve when it is updated, or "".
        undo: resources that recreate what a deletion removed, if the update after it fails.
    """

    verb: Verb
    kind: Kind
    which: Identity
    operation: str = ""
    request: Json | None = None
    resource: Resource | None = None
    changes: tuple[Difference, ...] = ()
    reason: str = ""
    expects: str = ""
    undo: tuple[Resource, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.kind.value}/{self.which[-1]}"

    @property
    def service(self) -> str:
        return CALLS[self.kind].service


@dataclass(frozen=True)
class Plan:
    """The actions for a deployment, in order.

    Attributes:
        deployment: name of the deployment.
        actions: actions, one or more for each resource.
        online: whether AWS was queried. If not, the plan assumes that no resources exist.
        dependents: names of other deployments' components, which prevent the deletion of the endpoint.
    """

    deployment: str
    actions: tuple[Action, ...]
    online: bool = True
    dependents: tuple[str, ...] = ()

    @property
    def changing(self) -> tuple[Action, ...]:
        return tuple(action for action in self.actions if action.verb is not Verb.UNCHANGED)


def plan(desired: Sequence[Resource], live: Live, *, keep: int = 2, adopt: bool = False) -> Plan:
    """Plan the changes.

    Args:
        desired: desired resources, in the order of their creation.
        keep: number of configuration versions to keep, including the new version.
        adopt: whether to take over resources that have a desired name but another owner.

    Raises:
        Refused: a resource has another owner and `adopt` is False, a component is on another endpoint or would be
            created with 0 copies, or the endpoint cannot run the components or has failed with other components on it.
        NotThere: the components are for another deployment's endpoint, which does not exist.
    """
    if not adopt:
        refuse_foreign(desired, live, "Choose another name, or take the resource over with --adopt.")
    _refuse_move(desired, live)
    _refuse_endpoint(desired, live)
    _refuse_empty(desired, live)
    failed = _failed(live)
    remaining = _without(live, failed)
    deregistered = to_deregister(desired, remaining)
    scaling = [item for target in deregistered for item in (target, *policies_of(target, remaining))]
    changes_in_order = _changes_in_order(desired, _without(remaining, scaling), deregistered, remaining)
    # Tags describe what serves, so they are changed last: an update that is rolled back must not change them.
    changes_in_order.sort(key=lambda action: action.verb is Verb.TAG)
    actions = (
        *map(_removal_of_failed, failed),
        *changes_in_order,
        *_removals(desired, _without(remaining, scaling), keep),
    )
    return Plan(live.deployment, actions, live.online)


def _removal_of_failed(item: LiveResource) -> Action:
    return removal_of(item, f"its status is {item.status}" if item.failed else _WITHOUT_OTHER)


_WITHOUT_OTHER = "the resource that it depends on is deleted"
_REGISTERED = "AWS refuses to remove a registered variant, or to change its instance type"


def _without(live: Live, gone: Sequence[LiveResource]) -> Live:
    return replace(
        live,
        resources=tuple(item for item in live.resources if item not in gone),
        foreign_scaling=tuple(item for item in live.foreign_scaling if item not in gone),
    )


def _changes_in_order(
    desired: Sequence[Resource], remaining: Live, deregistered: Sequence[LiveResource], live: Live
) -> list[Action]:
    """Return the creations and updates, with deregistrations before the endpoint's update.

    Args:
        remaining: existing resources without those that are deleted before.
        deregistered: scalable targets to delete before the update of the endpoint.
        live: existing resources with the scalable targets to deregister.
    """
    before = [replace(removal_of(target, _REGISTERED), undo=copies(target, live)) for target in deregistered]
    actions: list[Action] = []
    for resource in desired:
        if resource.kind is Kind.ENDPOINT:
            actions += before
        actions += action_of(resource, remaining, desired)
    lost_parts = [part for target in deregistered for part in lost(target, desired, live)]
    return [*actions, *(_creation(part, None) for part in lost_parts)]


def removal_of_all(live: Live) -> Plan:
    """Plan the deletion of all resources that the deployment owns.

    If its endpoint runs components of other deployments, the endpoint, its configuration and its alarms are kept.

    Raises:
        Refused: the endpoint has another owner, and the deployment is not a guest on it.
    """
    endpoint = live.endpoint
    if endpoint is not None and not endpoint.is_of(live.deployment) and not is_guest(live.deployment):
        raise Refused(
            foreign(endpoint.key),
            "Delete it with the tool that created it, or take it over with `lmi deploy up --adopt`. `lmi deploy down "
            "--shadow` removes only a shadow variant.",
        )
    retained = _of_endpoint(live) if live.foreign_components and not is_guest(live.deployment) else []
    gone = [item for item in in_order_of_removal(live.owned) if item not in retained]
    targets = [removal_of(target, "the resource that it scales is deleted") for target in _foreign_targets(live, gone)]
    names = tuple(sorted(item.name for item in live.foreign_components)) if retained else ()
    return Plan(live.deployment, (*targets, *(removal_of(existing, "") for existing in gone)), dependents=names)


def _foreign_targets(live: Live, gone: Sequence[LiveResource]) -> list[LiveResource]:
    """Return scalable targets of deleted resources that have other owners.

    AWS would keep the target of a deleted component, and apply it to a new component with the same name.
    """
    names = {(item.kind.value, item.name) for item in gone}
    targets = (item for item in live.foreign_scaling if item.kind is Kind.SCALABLE_TARGET)
    return [target for target in targets if _scaled(target) in names]


def _scaled(item: LiveResource) -> tuple[str, str]:
    """Return the kind and the name of the resource that a scalable target or a policy scales."""
    kind, name = str(item.description["ResourceId"]).split("/")[:2]
    return kind, name


def _of_endpoint(live: Live) -> list[LiveResource]:
    """Return the endpoint, its configuration, and its own alarms, omitting the alarms of components."""
    alarms = [item for item in live.of(Kind.ALARM) if item.name.count("/") == 1]
    return [item for item in (live.endpoint, live.config, *alarms) if item is not None]


def in_order_of_removal(resources: Sequence[LiveResource]) -> list[LiveResource]:
    """Sort resources so that each comes after the resources that use it, and adapters come before their components."""
    return sorted(resources, key=lambda item: (_REMOVAL.index(item.kind), _base(item) is None))


def _refuse_move(desired: Sequence[Resource], live: Live) -> None:
    """Refuse a component that is on another endpoint.

    Raises:
        Refused: a desired component is on another endpoint.
    """
    for resource in desired:
        existing = live.get(resource.kind, identity_of(resource)) if resource.kind is Kind.COMPONENT else None
        on = None if existing is None else existing.description.get("EndpointName")
        if on is not None and on != resource.request["EndpointName"]:
            raise Refused(
                f"{resource.key} is on the endpoint {on}, but AWS cannot move components between endpoints",
                "Choose another name, or delete the component there first.",
            )


def _refuse_endpoint(desired: Sequence[Resource], live: Live) -> None:
    """Refuse an endpoint that cannot run the components, or that must be deleted but runs other owners' components.

    Raises:
        NotThere: the components are for another deployment's endpoint, which does not exist.
        Refused: the plan cannot be applied to the endpoint; see `plan`.
    """
    endpoint = live.endpoint
    if not live.online:
        return
    names = ", ".join(sorted(item.name for item in live.foreign_components))
    if endpoint is not None and endpoint.failed and live.foreign_components:
        raise Refused(
            f"{endpoint.key} has failed, but it runs components of other deployments: {names}",
            "AWS can only delete it, and only after its components. Delete them with the tools that created them, "
            "and repeat this command.",
        )
    if is_guest(live.deployment):
        _refuse_shared(desired, endpoint, live)
    configs = [item.request for item in desired if item.kind is Kind.ENDPOINT_CONFIG]
    if live.foreign_components and any(
        "ModelName" in variant for config in configs for variant in config["ProductionVariants"]
    ):
        raise Refused(
            f"the endpoint would have its own model, but it runs components of other deployments: {names}",
            "Keep components in the specification, or have the other components deleted first.",
        )


def _refuse_shared(desired: Sequence[Resource], endpoint: LiveResource | None, live: Live) -> None:
    """Refuse another deployment's endpoint if it does not exist, has failed, or cannot run the components."""
    name, shared = name_and_endpoint(live.deployment)
    if endpoint is None:
        raise NotThere(f"endpoint: there is no endpoint {shared} for the components of {name}", "Deploy it first.")
    if endpoint.failed:
        raise Refused(f"endpoint: {shared} is {endpoint.status}", "Have its owner deploy it again first.")
    if any("ModelName" in variant for variant in live.variants):
        raise Refused(
            f"endpoint: {shared} has its own model, so components cannot be added",
            "Use an endpoint whose specification has components.",
        )
    names = [variant["VariantName"] for variant in live.variants]
    variant_names = {item.request["VariantName"] for item in desired if "VariantName" in item.request}
    if names and (lacking := variant_names.difference(names)):
        raise Refused(
            f"endpoint: {shared} has no variant {', '.join(sorted(lacking))}; it has {', '.join(names)}",
            "Use another endpoint, or set instance.variant.",
        )


def refuse_foreign(desired: Sequence[Resource], live: Live, advice: str) -> None:
    """Refuse desired names that already belong to a resource of another owner.

    Args:
        advice: advice for the message, on how to solve the problem.

    Raises:
        Refused: a resource has another owner.
    """
    for resource in desired:
        existing = live.get(resource.kind, identity_of(resource))
        if existing is not None and not existing.is_of(live.deployment):
            raise Refused(foreign(existing.key), advice)


def _refuse_empty(desired: Sequence[Resource], live: Live) -> None:
    """Refuse to create components with 0 copies, which AWS allows only in an update."""
    if not live.online:
        return
    for item in desired:
        empty = item.request.get("RuntimeConfig", {}).get("CopyCount") == 0
        existing = live.get(item.kind, identity_of(item))
        if empty and (existing is None or existing.failed):
            raise Refused(
                f"components {item.name}: AWS cannot create a component with copies: 0",
                "Create it with copies: 1 and set 0 later, or let it scale to zero with scaling.min: 0.",
            )


def _failed(live: Live) -> list[LiveResource]:
    """Return the failed resources and all resources that depend on them, which must be deleted first."""
    failed = {item.name for item in live.owned if item.failed and item.kind is Kind.COMPONENT}
    endpoint = live.endpoint
    everything = endpoint is not None and endpoint.failed and endpoint.is_of(live.deployment)

    def goes(item: LiveResource) -> bool:
        if item.kind is Kind.ENDPOINT:
            return everything
        if item.kind is Kind.COMPONENT:
            return everything or item.name in failed or _base(item) in failed
        if item.kind in (Kind.SCALABLE_TARGET, Kind.SCALING_POLICY):
            kind, name = _scaled(item)
            return everything or (kind == Kind.COMPONENT.value and name in failed)
        return False

    return in_order_of_removal([item for item in live.owned if goes(item)])


def action_of(resource: Resource, live: Live, desired: Sequence[Resource]) -> tuple[Action, ...]:
    """Return the actions for a desired resource: usually one action, or two if its tags change as well."""
    existing = live.get(resource.kind, identity_of(resource))
    if existing is None:
        return (_creation(resource, current_version(resource, live, desired)),)
    actions = (*_updates(resource, existing, live), *_retagging(resource, existing))
    return actions or (Action(Verb.UNCHANGED, resource.kind, existing.which, resource=resource),)


def _creation(resource: Resource, old: LiveResource | None) -> Action:
    """Return the action that creates a resource, or that replaces its old version."""
    verb = Verb.CREATE if old is None else Verb.REPLACE
    changes = () if old is None else differences(of_version(old.description), desired_fields(resource))
    # The name always differs between versions.
    changes = tuple(item for item in changes if item.path not in ("ModelName", "EndpointConfigName"))
    operation = CALLS[resource.kind].create
    return Action(verb, resource.kind, identity_of(resource), operation, resource.request, resource, changes)


def _updates(resource: Resource, existing: LiveResource, live: Live) -> Iterator[Action]:
    """Yield the action that updates a resource, if it differs from its desired state and AWS can update its kind."""
    operation, changes = CALLS[resource.kind].update, _changes(resource, existing, live)
    if changes and operation is not None:
        request = resource.update or {name: value for name, value in resource.request.items() if name != "Tags"}
        update = Action(Verb.UPDATE, resource.kind, existing.which, operation, request, resource, changes)
        if resource.kind is Kind.ENDPOINT and not existing.is_of(live.deployment):
            update = replace(update, expects=existing.description["EndpointConfigName"])
        yield update


def _changes(resource: Resource, existing: LiveResource, live: Live) -> tuple[Difference, ...]:
    """Return the differences between a resource and its desired state, except for tags."""
    descriptions = {item.key: item.description for item in live.resources}
    fields = resolved(desired_fields(resource), lambda ref: descriptions.get(ref.key, {}).get(ref.attribute, ref))
    changes = differences(as_request(resource.kind, existing.description), fields)
    if existing.mixed:  # AWS names one configuration, but several are serving
        changes = (*changes, Difference(str(CALLS[resource.kind].status), existing.status, READY[0]))
    return changes


def _retagging(resource: Resource, existing: LiveResource) -> Iterator[Action]:
    """Yield the action that changes a resource's tags, if they differ from the desired tags."""
    tags = _tags(resource)
    if changes := differences(existing.tags, tags):
        operation, request = tagging(resource.kind, existing.description[CALLS[resource.kind].arn], tags)
        yield Action(Verb.TAG, resource.kind, existing.which, operation, request, resource, changes)


def _tags(resource: Resource) -> Mapping[str, str]:
    tags: Any = resource.request.get("Tags", {})
    return tags if isinstance(tags, Mapping) else tag_map(tags)


def _removals(desired: Sequence[Resource], live: Live, keep: int) -> list[Action]:
    """Return the actions that delete outdated versions, and owned resources that are no longer desired."""
    names = {(item.kind, identity_of(item)) for item in desired}
    surplus = [item for item in live.owned if (item.kind, item.which) not in names]
    parts = [item for item in surplus if item.kind not in (Kind.MODEL, Kind.ENDPOINT_CONFIG, Kind.ENDPOINT)]
    parts += _foreign_targets(live, parts)
    old = outdated(desired, live, keep)
    return [
        removal_of(item, "an older version" if item in old else "no longer wanted")
        for item in in_order_of_removal([*parts, *old])
    ]


def removal_of(existing: LiveResource, reason: str) -> Action:
    operation, request = removal(existing.kind, existing.which)
    return Action(Verb.DELETE, existing.kind, existing.which, operation, request, reason=reason)


def _base(existing: LiveResource) -> str | None:
    """Return the name of an adapter's base component, or None for any other resource."""
    if existing.kind is not Kind.COMPONENT:
        return None
    base = existing.description.get("Specification", {}).get("BaseInferenceComponentName")
    return None if base is None else str(base)
