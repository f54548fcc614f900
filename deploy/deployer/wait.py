"""Wait until an endpoint or a component is serving, is deleted, or has failed, and report its progress.

This module polls, as botocore's waiter for endpoints does not report progress, and there is no waiter for components.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from deploy.aws import Aws
from deploy.deployer.calls import CALLS, is_temporary, show
from deploy.diagnostics import advice
from deploy.errors import Failed, NotThere
from deploy.operations import logs
from deploy.resolve.decision import Decision
from deploy.resources.resource import ENDED, MIXED, Kind, Resource, specifications

_PULL = 240.0  # seconds in which AWS usually finds an instance; after that it pulls the image
_SILENT = 600.0  # seconds without a log stream, after which the host or the image is likely wrong
_MARGIN = 900.0  # seconds for booting the instance and pulling the image, which no timeout covers
_PROVISION = 3600.0  # AWS's maximum
_LOG_TAIL = 40

T = TypeVar("T")


class Time(Protocol):
    """The functions of the `time` module that are needed for waiting."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float, /) -> None: ...


@dataclass(frozen=True)
class Progress:
    """The state of a resource at one poll.

    Attributes:
        key: key of the resource.
        status: status that AWS reports.
        phase: phrase that describes what is probably happening.
        elapsed: seconds since waiting started.
        limit: seconds after which waiting ends.
        log: last line of the container log, or "" if there is none yet.
        hint: advice if the resource takes too long, or "".
    """

    key: str
    status: str
    phase: str
    elapsed: float
    limit: float
    log: str = ""
    hint: str = ""

    @property
    def timeout(self) -> str:
        """Return the failure reason to report once `limit` has passed."""
        return f"{self.status} ({self.phase}) after {self.elapsed / 60:.0f} min"


Report = Callable[[Progress], None]


_GROUPS = {Kind.ENDPOINT: logs.endpoint_group, Kind.COMPONENT: logs.component_group}
_PHASES = {
    "InService": "serving",
    "Deleting": "deleting",
    "Updating": "replacing instances",
    "SystemUpdating": "AWS is updating the host",
    "RollingBack": "rolling back",
    "Failed": "failed",
    "OutOfService": "out of service",
    "UpdateRollbackFailed": "failed to roll back",
}
_VARIANT_PHASES = {
    "ActivatingTraffic": "shifting traffic",
    "Baking": "watching the alarms before continuing",
    "Deleting": "removing old instances",
}


def time_limit(decision: Decision, batches: int = 1, between: float = 0.0) -> float:
    """Return the number of seconds after which AWS itself must have given up.

    Args:
        batches: number of batches of an update.
        between: seconds between two batches.
    """
    provision = _PROVISION if decision.provision is None else decision.provision
    return batches * (provision + decision.start + between) + _MARGIN


def wait_for(
    aws: Aws,
    resource: Resource,
    report: Report,
    *,
    gone: bool = False,
    limit: float = 2 * _PROVISION,
    every: float = 15.0,
    consistency: float = 0.0,
    clock: Time = time,
) -> dict[str, Any]:
    """Wait until a resource serves or, with `gone`, no longer exists, and return AWS's last description.

    Args:
        resource: endpoint or component. If its request names a configuration or a model, that version must serve.
        report: function that is called on each poll.
        limit: timeout in seconds; see `time_limit`.
        every: seconds between two polls.
        consistency: seconds during which polls may still describe the state before the call.

    Raises:
        Failed: the operation failed or was rolled back, or the timeout has passed. The error contains FailureReason,
            the end of the log and advice.
        NotThere: the resource does not exist, or was deleted in the meantime.
    """
    last: dict[str, Any] = {}
    was_busy = False
    for elapsed, description in polls(
        lambda: show(aws, resource.kind, (resource.name,)), resource.key, report, limit=limit, every=every, clock=clock
    ):
        may_be_old = not gone and elapsed < consistency
        if description is None and gone:
            report(Progress(resource.key, "", "deleted", elapsed, limit))
            return last
        if description is None:
            if last or not may_be_old:
                raise NotThere(f"{resource.key} does not exist" + (" anymore" if last else ""))
            continue
        was_going = bool(last) and _status(resource, last) == "Deleting"
        last = description
        progress = _progress(aws, resource, description, elapsed, limit)
        # A resource in service may still have too few copies, as its phase then says.
        ended = progress.status in ENDED and progress.phase == _PHASES[progress.status]
        report(progress if gone or not ended else _with_version(progress, resource, description))
        was_busy = was_busy or not ended
        if ended and may_be_old and not was_busy and _is_previous_version(resource, description):
            continue
        if ended and (not gone or was_going):  # it may have failed before its deletion started
            return _verdict(aws, resource, description)
        if elapsed >= limit:
            raise _failure(aws, resource, description, progress.timeout, progress.hint)
    raise AssertionError("the polls never end")


def polls(
    read: Callable[[], T], key: str, report: Report, *, every: float, limit: float = 0.0, clock: Time = time
) -> Iterator[tuple[float, T]]:
    """Poll forever, and yield the elapsed seconds and the result of `read` each time.

    Polls that cannot reach AWS are only reported, because AWS continues its work regardless. Giving up would roll back
    a healthy deployment.

    Args:
        key: key of the resource for reports.
        limit: seconds after which a poll that cannot reach AWS raises an error, or 0 for no limit.

    Raises:
        ClientError, BotoCoreError: the error is not temporary, or AWS still cannot be reached after `limit`.
    """
    began = clock.monotonic()
    while True:
        elapsed = clock.monotonic() - began
        try:
            result = read()
        except (ClientError, BotoCoreError) as error:
            if not is_temporary(error) or (limit and elapsed >= limit):
                raise
            report(Progress(key, "", f"AWS cannot be reached: {error}", elapsed, limit))
        else:
            yield elapsed, result
        clock.sleep(min(every, limit - elapsed) if elapsed < limit else every)


def _with_version(progress: Progress, resource: Resource, description: Mapping[str, Any]) -> Progress:
    """Return the progress with a different phase if a resource in service does not serve the desired version."""
    desired, serves = _versions(resource, description)
    previous = progress.status == "InService" and desired != serves
    return replace(progress, phase="serving the previous version") if previous else progress


def _status(resource: Resource, description: Mapping[str, Any]) -> str:
    return str(description[str(CALLS[resource.kind].status)])


def _progress(aws: Aws, resource: Resource, description: Mapping[str, Any], elapsed: float, limit: float) -> Progress:
    status = _status(resource, description)
    copies = description.get("RuntimeConfig", {})
    desired, current = copies.get("DesiredCopyCount", 0), copies.get("CurrentCopyCount", 0)
    if status == "InService" and current < desired:
        return Progress(resource.key, status, f"{current} of {desired} copies are running", elapsed, limit)
    if status not in ("Creating", "Updating"):
        return Progress(resource.key, status, _PHASES.get(status, status), elapsed, limit)
    lines = _log(aws, resource, description)
    line = lines[-1].text if lines else ""
    hint = ""
    if status == "Creating" and lines is None and elapsed >= _SILENT:
        hint = advice(f"no log stream after {elapsed / 60:.0f} min")
    return Progress(resource.key, status, _phase(status, description, lines, elapsed), elapsed, limit, line, hint)


def _phase(status: str, description: Mapping[str, Any], lines: list[logs.LogLine] | None, elapsed: float) -> str:
    variants = description.get("PendingDeploymentSummary", {}).get("ProductionVariants", [])
    for variant in variants:
        for item in variant.get("VariantStatus", []):
            if item["Status"] in _VARIANT_PHASES:
                return _VARIANT_PHASES[item["Status"]]
    if status == "Updating":
        return _PHASES[status]
    if lines is None:
        return "finding an instance" if elapsed < _PULL else "pulling the image"
    return "loading the model"


def _log(aws: Aws, resource: Resource, description: Mapping[str, Any], count: int = 1) -> list[logs.LogLine] | None:
    """Return the last lines of the log, or None if there is no log or reading it is denied.

    Lines before the resource's creation are omitted, as they belong to an earlier resource with the same name.
    """
    try:
        lines = logs.tail(aws, _GROUPS[resource.kind](resource.name), count)
    except (ClientError, BotoCoreError):
        return None
    if not lines:
        return lines
    created = int(description["CreationTime"].timestamp()) * 1000
    return [line for line in lines if line.at >= created] or None


def _verdict(aws: Aws, resource: Resource, description: dict[str, Any]) -> dict[str, Any]:
    status = _status(resource, description)
    if status != "InService":
        raise _failure(aws, resource, description, str(description.get("FailureReason") or status))
    desired, serves = _versions(resource, description)
    if desired != serves:
        reason = description.get("FailureReason") or "an alarm went off, or the new instances did not become ready"
        raise _failure(aws, resource, description, f"the update was rolled back to {serves}: {reason}")
    return description


def _is_previous_version(resource: Resource, description: Mapping[str, Any]) -> bool:
    """Return whether AWS may still describe the state before an update, with a version other than the desired one."""
    if _status(resource, description) in MIXED:  # the state before an update
        return True
    desired, serves = _versions(resource, description)
    return _status(resource, description) == "InService" and "FailureReason" not in description and desired != serves


def _versions(resource: Resource, description: Mapping[str, Any]) -> tuple[object, object]:
    """Return the names of the desired and the serving version, or (None, None) if any version may serve."""
    request = resource.request
    if resource.kind is Kind.COMPONENT:
        request, description = (
            next((specification for specification in specifications(component) if "ModelName" in specification), {})
            for component in (request, description)
        )
    name = "ModelName" if resource.kind is Kind.COMPONENT else "EndpointConfigName"
    desired = request.get(name)
    return (desired, description.get(name, desired)) if isinstance(desired, str) else (None, None)


def _failure(aws: Aws, resource: Resource, description: Mapping[str, Any], reason: str, hint: str = "") -> Failed:
    lines = [line.text for line in _log(aws, resource, description, _LOG_TAIL) or []]
    name = resource.request.get("EndpointName", "NAME")
    advice_lines = [advice(reason, lines, name if isinstance(name, str) else "NAME") or hint]
    if lines:
        advice_lines += ["Last lines of the log:", *(f"  {line}" for line in lines[-10:])]
    return Failed(f"{resource.key}: {reason}", "\n".join(part for part in advice_lines if part))
