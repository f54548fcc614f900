"""What a deployment consists of, as values: one `Resource` a thing that AWS keeps for us.

The builders (`build.py`, `builders/`) make them of a specification, without I/O; `changes/` holds them against
what exists and makes it so; `export/` writes them as CloudFormation and Terraform.

The builders' order is the order in which things are made, and `needs` is what it follows from: the alarms that roll an
update back come before the endpoint, whose update names them; the alarm that wakes a sleeping component comes after the
policy that it starts. What AWS says only once a thing is there (a policy's ARN) stands in a request as a `Ref`; apply
puts the value in its place with `resolved` before the call.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Json = Mapping[str, Any]


class Kind(enum.Enum):
    """In the order in which they are looked for; that in which they are made is the builders'."""

    MODEL = "model"
    ENDPOINT_CONFIG = "endpoint-config"
    ENDPOINT = "endpoint"
    COMPONENT = "inference-component"
    SCALABLE_TARGET = "scalable-target"
    SCALING_POLICY = "scaling-policy"
    ALARM = "alarm"


READY = ("InService",)
FAILED = ("Failed", "OutOfService")
"""Of an endpoint or a component: only its deletion helps (botocore's EndpointStatus)."""

MIXED = ("UpdateRollbackFailed",)
"""Of an endpoint: the old and the new version serve beside each other, until an update succeeds."""

ENDED = (*READY, *FAILED, *MIXED)
"""AWS is at nothing of it."""


@dataclass(frozen=True)
class Ref:
    """In a request: a value that AWS gives when it makes, or describes, another resource.

    Attributes:
        key: of that resource, e.g. `scaling-policy/llama-wake`.
        attribute: its name in boto3's answer, e.g. `PolicyARN`.
    """

    key: str
    attribute: str


@dataclass(frozen=True)
class Resource:
    """One thing that AWS keeps.

    Attributes:
        kind: which of boto3's calls makes it (the table is `changes/calls.py`).
        name: what AWS knows it by, unique among its kind in the account and region.
        request: the keyword arguments of the boto3 call that makes it, tags included.
        needs: the keys of those that must be there before.
        update: the keyword arguments of the call that changes it where it is; empty: `request` without its tags, or
            nothing of it can be changed and its name says what it holds.
    """

    kind: Kind
    name: str
    request: Json
    needs: tuple[str, ...] = ()
    update: Json = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.kind.value}/{self.name}"


def refs(value: Any) -> tuple[Ref, ...]:
    """Those in a request, in its order."""
    if isinstance(value, Ref):
        return (value,)
    if isinstance(value, Mapping):
        return tuple(ref for one in value.values() for ref in refs(one))
    if isinstance(value, list | tuple):
        return tuple(ref for one in value for ref in refs(one))
    return ()


def resolved(value: Any, look_up: Callable[[Ref], Any]) -> Any:
    """A request with values for its `Ref`s."""
    if isinstance(value, Ref):
        return look_up(value)
    if isinstance(value, Mapping):
        return {name: resolved(one, look_up) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [resolved(one, look_up) for one in value]
    return value
