"""Compare the desired state of a resource with AWS's description, field by field.

Only desired fields are compared, as AWS adds defaults and facts of its own. A field that AWS has and the request lacks
is a difference only where leaving it out means "none".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.resources.resource import Json, Kind, Ref, Resource, resolved

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
"""Fields without a default: a specification that no longer has one does not want it."""

_NONE_IF_LEFT_OUT = ("AlarmActions", "OKActions", "InsufficientDataActions", *_OPTIONAL)
_OF_ENDPOINT = ("EndpointName", "EndpointConfigName")
_WHOLE = ("Environment", "Tags")
"""Maps in which AWS adds nothing."""


@dataclass(frozen=True)
class Difference:
    """A field that differs.

    Attributes:
        place: its names, with dots, e.g. `PrimaryContainer.Image`.
        before, after: None: absent.
    """

    place: str
    before: Any
    after: Any


def differences(before: Json, after: Json) -> tuple[Difference, ...]:
    """Return what must change in `before` to get `after`."""
    return tuple(_differ("", before, after, whole=False))


def desired_fields(resource: Resource) -> dict[str, Any]:
    """Return the fields of a request to compare with `as_request`: without tags and settings of an update."""
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
    """Return AWS's description in the fields of the request that creates the resource."""
    if kind is Kind.ENDPOINT:  # the other fields are its configuration's
        return {name: description.get(name) for name in _OF_ENDPOINT}
    fields = dict(description)
    if kind is Kind.COMPONENT:
        fields["RuntimeConfig"] = {"CopyCount": description.get("RuntimeConfig", {}).get("DesiredCopyCount")}
        fields["Specification"] = _specification(description.get("Specification", {}))
        fields["Specifications"] = _by_type([_specification(one) for one in description.get("Specifications", ())])
    return fields


def of_version(description: Json) -> dict[str, Any]:
    """Return a model or a configuration as it would be asked for: SageMaker's default routing, and one container."""
    fields = dict(description)
    if "ProductionVariants" in fields:
        default = {"RoutingConfig": {"RoutingStrategy": "RANDOM"}}
        fields["ProductionVariants"] = [{**default, **one} for one in fields["ProductionVariants"]]
    if not fields.get("PrimaryContainer") and len(fields.get("Containers", ())) == 1:
        (fields["PrimaryContainer"],) = fields["Containers"]
    return fields


def _by_type(specifications: Sequence[Json]) -> list[Json]:
    """Sort the specifications of a component, which AWS may list in any order."""
    return sorted(specifications, key=lambda one: str(one.get("InstanceType")))


def _specification(description: Json) -> dict[str, Any]:
    fields = dict(description)
    if container := fields.get("Container"):
        image = container.get("DeployedImage", {}).get("SpecifiedImage")
        fields_of_request = {name: value for name, value in container.items() if name != "DeployedImage"}
        fields["Container"] = {**fields_of_request, **({"Image": image} if image is not None else {})}
    return fields


def with_known_refs(request: Json, known: Mapping[str, Json]) -> Any:
    """Replace each `Ref` whose value is known; the others stay.

    Args:
        known: AWS's descriptions, by key of the resource.
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
