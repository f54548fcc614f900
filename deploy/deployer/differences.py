"""Two descriptions of one thing, field by field: what is wanted, and what AWS says it is.

Only what is wanted is looked at, because AWS adds defaults and facts of its own to what it shows. What AWS would keep
though it is not wanted any more counts where leaving it out means none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deploy.resources.resource import Json, Kind, Ref, Resource, resolved

_NONE_IF_LEFT_OUT = ("AlarmActions", "OKActions", "InsufficientDataActions")
_WHOLE = ("Environment", "Tags")
"""Maps that hold what was given and nothing of AWS's."""


@dataclass(frozen=True)
class Difference:
    """One field.

    Attributes:
        place: its names, with dots, e.g. `PrimaryContainer.Image`.
        before, after: None: not there.
    """

    place: str
    before: Any
    after: Any


def differences(before: Json, after: Json) -> tuple[Difference, ...]:
    """What must change in `before` for it to be `after`."""
    return tuple(_differ("", before, after, whole=False))


def wanted_of(resource: Resource) -> dict[str, Any]:
    """The fields of a request that can be held against `shown`: without tags, and without how a change is made."""
    request = resource.request
    if resource.kind is Kind.COMPONENT and resource.update:
        request = resource.update
    if resource.kind is Kind.ENDPOINT:
        request = {name: request[name] for name in ("EndpointName", "EndpointConfigName")}
    return {name: value for name, value in request.items() if name not in ("Tags", "DeploymentConfig")}


def shown(kind: Kind, said: Json) -> dict[str, Any]:
    """What AWS says of a thing, in the words of the request that makes it."""
    fields = dict(said)
    if kind is Kind.COMPONENT:
        fields["RuntimeConfig"] = {"CopyCount": said.get("RuntimeConfig", {}).get("DesiredCopyCount")}
        specification = dict(said.get("Specification", {}))
        if container := specification.get("Container"):
            image = container.get("DeployedImage", {}).get("SpecifiedImage")
            own = {name: value for name, value in container.items() if name != "DeployedImage"}
            specification["Container"] = {**own, **({"Image": image} if image is not None else {})}
        fields["Specification"] = specification
    return fields


def with_known(request: Json, known: Mapping[str, Json]) -> Any:
    """A request with what is known already in the place of its `Ref`s; the others stay.

    Args:
        known: what AWS says of things, by their resource's key.
    """
    return resolved(request, lambda ref: known.get(ref.key, {}).get(ref.attribute, ref))


def _differ(place: str, before: Any, after: Any, *, whole: bool) -> Iterator[Difference]:
    if isinstance(after, Mapping) and isinstance(before, Mapping):
        for name, value in after.items():
            yield from _differ(f"{place}.{name}".lstrip("."), before.get(name), value, whole=name in _WHOLE)
        for name in before:
            if name not in after and (whole or name in _NONE_IF_LEFT_OUT) and before[name]:
                yield Difference(f"{place}.{name}".lstrip("."), before[name], None)
    elif isinstance(after, list | tuple) and isinstance(before, list | tuple) and len(after) == len(before):
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from _differ(f"{place}[{number}]", old, new, whole=whole)
    elif before != after and not (_nothing(before) and _nothing(after)):
        yield Difference(place, before, after)


def _nothing(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping | list | tuple) and not value and not isinstance(value, Ref))
