"""What has to be done so that AWS has what is wanted: wanted resources held against what there is. Pure.

The order: what must go first because it failed (what AWS calls Failed can only be deleted), what is made and changed in
the builders' order, and at the end what is not wanted any more, last made first.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.deployer.calls import CALLS, Identity, identity, removal, tagging
from deploy.deployer.differences import Difference, differences, shown, wanted_of, with_known
from deploy.deployer.live import Live, LiveResource
from deploy.deployer.versions import current_version, outdated
from deploy.errors import Refused
from deploy.resources.resource import READY, Json, Kind, Resource

_REMOVAL = (
    Kind.SCALING_POLICY,
    Kind.SCALABLE_TARGET,
    Kind.ALARM,
    Kind.COMPONENT,
    Kind.ENDPOINT,
    Kind.ENDPOINT_CONFIG,
    Kind.MODEL,
)
"""The order in which things go: nothing before what uses it."""


class Verb(enum.Enum):
    CREATE = "create"
    REPLACE = "replace"
    """A new version beside the old one, as AWS cannot change its kind."""
    UPDATE = "update"
    TAG = "tag"
    UNCHANGED = "unchanged"
    DELETE = "delete"


@dataclass(frozen=True)
class Action:
    """One call, or none.

    Attributes:
        which: of which thing.
        operation: boto3's method, e.g. `create_model`; empty if unchanged.
        request: its arguments, whole; `Ref`s in it are known once what they name is there.
        resource: the one wanted; None if it is to go.
        changes: field by field.
        why: of what goes.
    """

    verb: Verb
    kind: Kind
    which: Identity
    operation: str = ""
    request: Json | None = None
    resource: Resource | None = None
    changes: tuple[Difference, ...] = ()
    why: str = ""

    @property
    def key(self) -> str:
        return f"{self.kind.value}/{self.which[-1]}"

    @property
    def service(self) -> str:
        return CALLS[self.kind].service


@dataclass(frozen=True)
class Plan:
    """Attributes: deployment: its name; asked: False: made without AWS, as if nothing existed."""

    deployment: str
    actions: tuple[Action, ...]
    asked: bool = True

    @property
    def changing(self) -> tuple[Action, ...]:
        return tuple(action for action in self.actions if action.verb is not Verb.UNCHANGED)


def plan(wanted: Sequence[Resource], live: Live, *, keep: int = 2, adopt: bool = False) -> Plan:
    """What to do.

    Args:
        wanted: in the order of making.
        keep: how many versions of the configuration stay, the new one among them.
        adopt: take things over that bear a wanted name without being ours.

    Raises:
        Refused: such a thing is there, and `adopt` is not said.
    """
    _ours_only(wanted, live, adopt)
    lost = _lost(live)
    first = [
        _removal(found, f"its state is {found.status}" if found.failed else "what it is on goes") for found in lost
    ]
    kept = Live(live.deployment, tuple(one for one in live.things if one not in lost), live.asked)
    made = [action for resource in wanted for action in _action(resource, kept)]
    last = [_removal(found, why) for found, why in _unwanted(wanted, kept, keep)]
    return Plan(live.deployment, (*first, *made, *last), live.asked)


def removal_of_all(live: Live) -> Plan:
    """Everything that is ours.

    Raises:
        Refused: the endpoint of that name is another's.
    """
    endpoint = live.endpoint
    if endpoint is not None and not endpoint.is_of(live.deployment):
        raise Refused(_foreign(endpoint), "Delete it as it was made, or take it over with `lmi deploy up --adopt`.")
    return Plan(live.deployment, tuple(_removal(found, "") for found in in_order_of_removal(live.ours)))


def in_order_of_removal(things: Sequence[LiveResource]) -> list[LiveResource]:
    """Nothing before what uses it; adapters before the components that they are on."""
    return sorted(things, key=lambda one: (_REMOVAL.index(one.kind), _base(one) is None))


def _ours_only(wanted: Sequence[Resource], live: Live, adopt: bool) -> None:
    if adopt:
        return
    for resource in wanted:
        found = live.get(resource.kind, identity(resource.kind, resource.request))
        if found is not None and not found.is_of(live.deployment):
            raise Refused(_foreign(found), "Choose another name, or take it over: --adopt.")


def _foreign(found: LiveResource) -> str:
    return f"{found.kind.value}/{found.name} exists and was not made by this deployment"


def _lost(live: Live) -> list[LiveResource]:
    """What has failed for good, and all that is on it: they go before anything is made."""
    failed = {one.name for one in live.ours if one.failed and one.kind is Kind.COMPONENT}
    endpoint = live.endpoint
    everything = endpoint is not None and endpoint.failed

    def goes(one: LiveResource) -> bool:
        if one.kind is Kind.ENDPOINT:
            return everything
        if one.kind is Kind.COMPONENT:
            return everything or one.name in failed or _base(one) in failed
        if one.kind in (Kind.SCALABLE_TARGET, Kind.SCALING_POLICY):
            of, name = str(one.said["ResourceId"]).split("/")[:2]
            return everything or (of == "inference-component" and name in failed)
        return False

    return in_order_of_removal([one for one in live.ours if goes(one)])


def _action(resource: Resource, live: Live) -> tuple[Action, ...]:
    """What one wanted resource takes: usually one call; two where its tags change too."""
    calls = CALLS[resource.kind]
    which = identity(resource.kind, resource.request)
    found = live.get(resource.kind, which)
    if found is None:
        old = current_version(resource, live)
        verb = Verb.CREATE if old is None else Verb.REPLACE
        changes = () if old is None else differences(old.said, wanted_of(resource))
        return (Action(verb, resource.kind, which, calls.create, resource.request, resource, _unnamed(changes)),)
    known = {f"{one.kind.value}/{one.name}": one.said for one in live.things}
    changes = differences(shown(resource.kind, found.said), with_known(wanted_of(resource), known))
    if found.mixed:  # whatever configuration AWS names, others serve too
        changes = (*changes, Difference(str(calls.status), found.status, READY[0]))
    actions = []
    if changes and calls.update is not None:
        request = resource.update or {name: value for name, value in resource.request.items() if name != "Tags"}
        actions.append(Action(Verb.UPDATE, resource.kind, which, calls.update, request, resource, changes))
    if retagged := differences(found.tags, _tags(resource)):
        operation, request = tagging(resource.kind, found.said[calls.arn], _tags(resource))
        actions.append(Action(Verb.TAG, resource.kind, which, operation, request, resource, retagged))
    return tuple(actions) or (Action(Verb.UNCHANGED, resource.kind, which, resource=resource),)


def _tags(resource: Resource) -> Mapping[str, str]:
    tags: Any = resource.request.get("Tags", {})
    return tags if isinstance(tags, Mapping) else {tag["Key"]: tag["Value"] for tag in tags}


def _unnamed(changes: tuple[Difference, ...]) -> tuple[Difference, ...]:
    """Without the name, which differs between all versions."""
    return tuple(one for one in changes if one.place not in ("ModelName", "EndpointConfigName"))


def _unwanted(wanted: Sequence[Resource], live: Live, keep: int) -> list[tuple[LiveResource, str]]:
    """Ours that the specification does not name: parts that were taken out of it, and versions that nobody needs."""
    names = {(one.kind, identity(one.kind, one.request)) for one in wanted}
    surplus = [one for one in live.ours if (one.kind, one.which) not in names]
    parts = [one for one in surplus if one.kind not in (Kind.MODEL, Kind.ENDPOINT_CONFIG, Kind.ENDPOINT)]
    old = outdated(wanted, live, keep)
    why = {id(one): "not wanted any more" for one in parts} | {id(one): "an older version" for one in old}
    return [(one, why[id(one)]) for one in in_order_of_removal([*parts, *old])]


def _removal(found: LiveResource, why: str) -> Action:
    operation, request = removal(found.kind, found.which)
    return Action(Verb.DELETE, found.kind, found.which, operation, request, why=why)


def _base(found: LiveResource) -> str | None:
    """Of an adapter: the component that it is on."""
    if found.kind is not Kind.COMPONENT:
        return None
    base = found.said.get("Specification", {}).get("BaseInferenceComponentName")
    return None if base is None else str(base)
