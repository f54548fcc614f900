"""SageMaker's control plane in a dict: what moto 5.2 lacks of it, or takes without a word.

Models, endpoint configurations, endpoints and inference components with AWS's own conflicts, and with states that go on
by one with every look at them: `polls` looks show the busy state, the next one its end. `fate` and `fate_of` say how
one ends.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from moto.core.exceptions import ServiceException
from moto.utilities.utils import get_partition

ACCOUNT = "123456789012"


class Invalid(ServiceException):
    code = "ValidationException"


class Missing(ServiceException):
    code = "ResourceNotFound"


@dataclass(frozen=True)
class Fate:
    """How a creation or an update ends.

    Attributes:
        status: `InService`, `Failed`, `RolledBack` (of an update: back in service as before), `UpdateRollbackFailed`.
        reason: FailureReason.
        polls: looks that show the busy state before; None is the double's.
    """

    status: str
    reason: str | None = None
    polls: int | None = None


@dataclass
class Thing:
    """A resource: what was asked for, and where it is on its way."""

    kind: str
    name: str
    arn: str
    request: dict[str, Any]
    created: datetime.datetime
    tags: dict[str, str]
    status: str = "InService"
    reason: str | None = None
    left: int = 0
    end: Callable[[], None] | None = None
    before: dict[str, Any] | None = None  # of an update: what it served
    coming: str | None = None  # of an update: the configuration that it is to serve

    def look(self) -> None:
        """One poll: the busy state, or what comes of it."""
        if self.end is None:
            return
        if self.left > 0:
            self.left -= 1
            return
        end, self.end = self.end, None
        end()

    @property
    def busy(self) -> bool:
        return self.end is not None


SAID = {
    "model": "model",
    "endpoint-config": "endpoint configuration",
    "endpoint": "endpoint",
    "inference-component": "inference component",
    "transform-job": "requested job with name",
}
"""As AWS's messages call them."""


@dataclass
class SageMaker:
    """Everything that there is; `reset` empties it.

    Attributes:
        may_take: whether SageMaker may take a role, by its ARN.
        fate_of: how a creation or update ends that `fate` says nothing of, by what was asked for.
    """

    polls: int = 1
    things: dict[tuple[str, str], Thing] = field(default_factory=dict)
    fates: dict[str, list[Fate]] = field(default_factory=dict)
    on_endpoint_gone: Callable[[str], None] = lambda name: None
    may_take: Callable[[str], bool] = lambda role: True
    fate_of: Callable[[Thing, Mapping[str, Any]], Fate] = lambda thing, wanted: Fate("InService")
    _ticks: int = 0

    def reset(self) -> None:
        self.polls = 1
        self.things.clear()
        self.fates.clear()

    def fate(self, name: str, status: str, reason: str | None = None, polls: int | None = None) -> None:
        """How the next creation or update of the endpoint or component `name` ends; further ones queue up."""
        self.fates.setdefault(name, []).append(Fate(status, reason, polls))

    def names(self, kind: str) -> list[str]:
        """Of all that there are of a kind, sorted."""
        return sorted(name for of, name in self.things if of == kind)

    def get(self, kind: str, name: str) -> Thing:
        thing = self.things.get((kind, name))
        if thing is None:
            raise Invalid(f'Could not find {SAID[kind]} "{arn(kind, name)}".')
        return thing

    def create(self, kind: str, name: str, request: dict[str, Any], region: str) -> Thing:
        if (kind, name) in self.things:
            raise Invalid(f'Cannot create already existing {SAID[kind]} "{arn(kind, name, region)}".')
        tags = {tag["Key"]: tag["Value"] for tag in request.pop("Tags", None) or ()}
        thing = Thing(kind, name, arn(kind, name, region), request, self._now(), tags)
        self.things[kind, name] = thing
        return thing

    def check_role(self, role: str) -> None:
        if not self.may_take(role):
            raise Invalid(
                f"Could not assume role {role}. Please ensure that the role exists and allows principal "
                "'sagemaker.amazonaws.com' to assume the role."
            )

    def begin(
        self,
        thing: Thing,
        status: str,
        done: Callable[[], None] | None = None,
        wanted: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """A creation or an update, which ends as `fate` or `fate_of` says."""
        queue = self.fates.get(thing.name, [])
        fate = queue.pop(0) if queue else self.fate_of(thing, wanted)
        thing.status, thing.reason, thing.coming = status, None, None
        thing.left = self.polls if fate.polls is None else fate.polls

        def end() -> None:
            thing.status, thing.reason = fate.status, fate.reason
            if fate.status == "RolledBack":
                thing.status = "InService"
            if fate.status in ("RolledBack", "UpdateRollbackFailed") and thing.before is not None:
                thing.request = thing.before
            elif fate.status == "InService" and done is not None:
                done()

        thing.end = end

    def begin_deletion(self, thing: Thing, gone: Callable[[], None]) -> None:
        thing.status, thing.reason, thing.left = "Deleting", None, self.polls

        def end() -> None:
            del self.things[thing.kind, thing.name]
            gone()

        thing.end = end

    def look(self, kind: str, name: str) -> Thing:
        """As a describe call: counts as a poll, and what has gone is not found."""
        self.get(kind, name).look()
        return self.get(kind, name)

    def components_of(self, endpoint: str) -> list[Thing]:
        return [
            thing
            for (kind, _), thing in self.things.items()
            if kind == "inference-component" and thing.request["EndpointName"] == endpoint
        ]

    def by_arn(self, wanted: str) -> Thing:
        for thing in self.things.values():
            if thing.arn == wanted:
                return thing
        raise Invalid(f"Could not find resource {wanted}")

    def _now(self) -> datetime.datetime:
        """Of each thing another second, so that the newest is known."""
        self._ticks += 1
        return datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc) + datetime.timedelta(seconds=self._ticks)


def page(things: list[Any], p: Mapping[str, Any]) -> tuple[list[Any], dict[str, str]]:
    """Return the part of a list that a call asks for, and the token for the next one, if there is more.

    Raises:
        Invalid: the call's token is none of ours.
    """
    token = p.get("NextToken") or "0"
    if not re.fullmatch("[0-9]{1,9}", token):
        raise Invalid("The NextToken is not valid.")
    last = int(token) + int(p.get("MaxResults") or 10)
    return things[int(token) : last], {"NextToken": str(last)} if last < len(things) else {}


def arn(kind: str, name: str, region: str = "us-east-1") -> str:
    return f"arn:{get_partition(region)}:sagemaker:{region}:{ACCOUNT}:{kind}/{name}"
