"""Waiting until an endpoint or a component serves, is gone, or has failed; what is seen meanwhile are values.

botocore has a waiter for endpoints that says nothing, and none for components (contract sagemaker.md, section 3.5), so
the polling is our own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from botocore.exceptions import BotoCoreError, ClientError

from deploy.aws import Aws
from deploy.deployer.calls import CALLS, show
from deploy.deployer.reach import passes
from deploy.diagnostics.advice import advice
from deploy.errors import Failed, NotThere
from deploy.operations import logs
from deploy.resolve.decision import Decision
from deploy.resources.resource import ENDED, MIXED, Kind, Resource

_PULL = 240.0  # seconds after which an instance has mostly been found; the rest is the image's pull
_SILENT = 600.0  # contract, section 5: "Creating, no log stream after 10 min" is a wrong host, or no image
_MARGIN = 900.0  # seconds for what no timeout of ours covers: the instance's boot and the image's pull
_PROVISION = 3600.0  # AWS's own longest
_LOG_TAIL = 40

SETTLES = 60.0
"""Seconds in which AWS may still show what was before a call: that a new thing is not there, or the old version."""


class Time(Protocol):
    """Of `time`, what waiting needs."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


@dataclass(frozen=True)
class Progress:
    """What was seen at one look.

    Attributes:
        key: the resource's.
        status: AWS's word.
        phase: what is likely going on, in ours.
        elapsed: seconds since the waiting began.
        limit: seconds after which it is given up.
        log: the container's last line; empty where there is none yet.
        hint: what to look at, where it takes longer than it should.
    """

    key: str
    status: str
    phase: str
    elapsed: float
    limit: float
    log: str = ""
    hint: str = ""


Report = Callable[[Progress], None]


_GROUPS = {Kind.ENDPOINT: logs.endpoint_group, Kind.COMPONENT: logs.component_group}
_PHASES = {
    "InService": "serving",
    "Deleting": "deleting",
    "Updating": "replacing instances",
    "SystemUpdating": "AWS updates the host",
    "RollingBack": "rolling back",
    "Failed": "failed",
    "OutOfService": "out of service",
    "UpdateRollbackFailed": "failed to roll back",
}
_VARIANT_PHASES = {
    "ActivatingTraffic": "moving the traffic over",
    "Baking": "watching the alarms before going on",
    "Deleting": "taking old instances away",
}


def time_limit(decision: Decision, batches: int = 1, between: float = 0.0) -> float:
    """Seconds after which waiting makes no sense: AWS itself has given up by then.

    Args:
        batches: that an update replaces the instances in; `between`: seconds between two of them.
    """
    provision = _PROVISION if decision.provision is None else decision.provision
    return batches * (provision + decision.download + decision.startup + between) + _MARGIN


def wait_for(
    aws: Aws,
    resource: Resource,
    report: Report,
    *,
    gone: bool = False,
    limit: float = 2 * _PROVISION,
    every: float = 15.0,
    settles: float = 0.0,
    clock: Time = time,
) -> dict[str, Any]:
    """Wait until it serves (or, with `gone`, until it does not exist), and return what AWS said of it last.

    Args:
        resource: an endpoint or a component; of an endpoint whose request names a configuration, that one must serve.
        report: called at each look.
        limit: seconds; `time_limit` derives them.
        every: seconds between two looks.
        settles: seconds in which the first looks may show what was before the call that is waited for.

    Raises:
        Failed: AWS gave up, rolled back, or the limit has passed: with FailureReason, the log's end and advice.
        NotThere: it does not exist, or was deleted meanwhile.
    """
    began = clock.monotonic()
    last: dict[str, Any] = {}
    was_busy = False
    while True:
        elapsed = clock.monotonic() - began
        try:
            found = show(aws, resource.kind, (resource.name,))
        except (ClientError, BotoCoreError) as error:
            # What AWS does goes on whether we can look or not: giving up here would undo what is well.
            if not passes(error) or elapsed >= limit:
                raise
            report(Progress(resource.key, "", f"AWS cannot be asked: {error}", elapsed, limit))
            clock.sleep(every)
            continue
        if found is None and not gone and not last and elapsed < settles:
            clock.sleep(every)
            continue
        if found is None:
            if gone:
                report(Progress(resource.key, "", "gone", elapsed, limit))
                return last
            raise NotThere(f"{resource.key} does not exist" + (" any more" if last else ""))
        was_going, last = bool(last) and _status(resource, last) == "Deleting", found
        seen = _seen(aws, resource, found, elapsed, limit)
        report(seen)
        ended = seen.status in ENDED and seen.phase == _PHASES[seen.status]  # else copies are still missing
        was_busy = was_busy or not ended
        if ended and not gone and not was_busy and elapsed < settles and _is_old(resource, found):
            clock.sleep(every)
            continue
        if ended and (not gone or was_going):  # what is to go may be called failed at first
            return _verdict(aws, resource, found)
        if elapsed >= limit:
            raise _failure(aws, resource, f"{seen.status} ({seen.phase}) after {elapsed / 60:.0f} min", seen.hint)
        clock.sleep(min(every, max(limit - elapsed, 0.0)))


def _status(resource: Resource, found: Mapping[str, Any]) -> str:
    return str(found[str(CALLS[resource.kind].status)])


def _seen(aws: Aws, resource: Resource, found: Mapping[str, Any], elapsed: float, limit: float) -> Progress:
    status = _status(resource, found)
    copies = found.get("RuntimeConfig", {})
    wanted, there = copies.get("DesiredCopyCount", 0), copies.get("CurrentCopyCount", 0)
    if status == "InService" and there < wanted:
        return Progress(resource.key, status, f"{there} of {wanted} copies are up", elapsed, limit)
    if status not in ("Creating", "Updating"):
        return Progress(resource.key, status, _PHASES.get(status, status), elapsed, limit)
    written = _log(aws, resource)
    line = written[-1].text if written else ""
    hint = ""
    if status == "Creating" and written is None and elapsed >= _SILENT:
        hint = advice(f"no log stream after {elapsed / 60:.0f} min")
    return Progress(resource.key, status, _phase(status, found, written, elapsed), elapsed, limit, line, hint)


def _phase(status: str, found: Mapping[str, Any], written: list[logs.Line] | None, elapsed: float) -> str:
    variants = found.get("PendingDeploymentSummary", {}).get("ProductionVariants", [])
    for variant in variants:
        for one in variant.get("VariantStatus", []):
            if one["Status"] in _VARIANT_PHASES:
                return _VARIANT_PHASES[one["Status"]]
    if status == "Updating":
        return _PHASES[status]
    if written is None:
        return "finding an instance" if elapsed < _PULL else "pulling the image"
    return "loading the model"


def _log(aws: Aws, resource: Resource, count: int = 1) -> list[logs.Line] | None:
    """The log's end; as if there were none where it may not be read, because waiting goes on without it."""
    try:
        return logs.tail(aws, _GROUPS[resource.kind](resource.name), count)
    except (ClientError, BotoCoreError):
        return None


def _verdict(aws: Aws, resource: Resource, found: dict[str, Any]) -> dict[str, Any]:
    status = _status(resource, found)
    if status != "InService":
        raise _failure(aws, resource, str(found.get("FailureReason") or status))
    wanted, serves = _versions(resource, found)
    if wanted != serves:
        reason = found.get("FailureReason") or "an alarm went off, or the new instances did not get ready"
        raise _failure(aws, resource, f"the update was rolled back to {serves}: {reason}")
    return found


def _is_old(resource: Resource, found: Mapping[str, Any]) -> bool:
    """Whether it serves another version than the wanted one, and nothing says that this is how the update ended."""
    if _status(resource, found) in MIXED:  # what an update began from
        return True
    wanted, serves = _versions(resource, found)
    return _status(resource, found) == "InService" and "FailureReason" not in found and wanted != serves


def _versions(resource: Resource, found: Mapping[str, Any]) -> tuple[object, object]:
    """The configuration (of a component, the model) that is wanted, and the one that serves; alike where none is."""
    request = resource.request
    if resource.kind is Kind.COMPONENT:
        request, found = request.get("Specification", {}), found.get("Specification", {})
    name = "ModelName" if resource.kind is Kind.COMPONENT else "EndpointConfigName"
    wanted = request.get(name)
    return (wanted, found.get(name, wanted)) if isinstance(wanted, str) else (None, None)


def _failure(aws: Aws, resource: Resource, reason: str, hint: str = "") -> Failed:
    written = [line.text for line in _log(aws, resource, _LOG_TAIL) or []]
    name = resource.request.get("EndpointName", "NAME")
    said = [advice(reason, written, name if isinstance(name, str) else "NAME") or hint]
    if written:
        said += ["The log's end:", *(f"  {line}" for line in written[-10:])]
    return Failed(f"{resource.key}: {reason}", "\n".join(part for part in said if part))
