"""Values for the resources of a deployment: one `Resource` for each resource in AWS.

`build.py` builds them, `deployer/` compares them with AWS and applies the difference, `export/` writes templates.

They are sorted in the order of their creation, which follows from `needs`. Alarms come before the endpoint, whose
update names them. The alarm that wakes a sleeping component comes after the policy that it starts. A value that AWS
assigns on creation (a policy's ARN) is a `Ref` in a request; apply replaces it before the call.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Json = Mapping[str, Any]


class Kind(enum.Enum):
    """Kinds of resources, in the order in which they are looked for."""

    MODEL = "model"
    ENDPOINT_CONFIG = "endpoint-config"
    ENDPOINT = "endpoint"
    COMPONENT = "inference-component"
    SCALABLE_TARGET = "scalable-target"
    SCALING_POLICY = "scaling-policy"
    ALARM = "alarm"


DIMENSIONS = {
    Kind.ENDPOINT: "sagemaker:variant:DesiredInstanceCount",
    Kind.COMPONENT: "sagemaker:inference-component:DesiredCopyCount",
}
"""What Application Auto Scaling changes of each kind that it scales."""

READY = ("InService",)
FAILED = ("Failed", "OutOfService")
"""Statuses of an endpoint or component that only its deletion ends (botocore's EndpointStatus)."""

MIXED = ("UpdateRollbackFailed",)
"""Status of an endpoint whose old and new version serve side by side, until an update succeeds."""

ENDED = (*READY, *FAILED, *MIXED)
"""Statuses in which AWS is idle."""


@dataclass(frozen=True)
class Ref:
    """A value in a request that AWS assigns to another resource.

    Attributes:
        key: the other resource's key, e.g. `scaling-policy/llama-wake`.
        attribute: its name in boto3's answer, e.g. `PolicyARN`.
    """

    key: str
    attribute: str


@dataclass(frozen=True)
class Resource:
    """One resource in AWS.

    Attributes:
        kind: decides the boto3 calls (`deployer/calls.py`).
        name: its name in AWS, unique among its kind in the account and region.
        request: keyword arguments of the boto3 call that creates it, tags included.
        needs: keys of resources that must exist before.
        update: keyword arguments of the call that changes it; empty: `request` without tags, or it cannot be changed.
    """

    kind: Kind
    name: str
    request: Json
    needs: tuple[str, ...] = ()
    update: Json = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.kind.value}/{self.name}"


def specifications(component: Json) -> tuple[Json, ...]:
    """Return a component's specifications: one, or one for each instance type."""
    return (component.get("Specification", {}), *component.get("Specifications", ()))


def containers(model: Json) -> list[Json]:
    """Return a model's containers."""
    return [one for one in (model.get("PrimaryContainer"), *model.get("Containers", ())) if one]


def refs(value: Any) -> tuple[Ref, ...]:
    """Return the `Ref`s in a request, in order."""
    if isinstance(value, Ref):
        return (value,)
    if isinstance(value, Mapping):
        return tuple(ref for item in value.values() for ref in refs(item))
    if isinstance(value, list | tuple):
        return tuple(ref for item in value for ref in refs(item))
    return ()


def resolved(value: Any, look_up: Callable[[Ref], Any]) -> Any:
    """Return a request with values in place of its `Ref`s."""
    if isinstance(value, Ref):
        return look_up(value)
    if isinstance(value, Mapping):
        return {name: resolved(item, look_up) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [resolved(item, look_up) for item in value]
    return value
