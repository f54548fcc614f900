"""How what serves is changed: in batches or all at once, and which alarms undo it.

A batch is 5 to 50 % of what there is (API's RollingUpdatePolicy), so a single instance or copy cannot roll.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from deploy.resolve.decision import Decision
from deploy.resources.endpoint_config import instances
from deploy.resources.resource import Resource
from deploy.spec import Spec
from deploy.spec.sections import Component

_PROVISION = 900  # seconds allowed for instances to be found, where the specification says nothing
_MOST_ALARMS = 10
_LONGEST = 28800
_SHORTEST = 600


def endpoint_deployment(spec: Spec, decision: Decision, alarms: Sequence[Resource]) -> dict[str, Any]:
    """UpdateEndpoint's DeploymentConfig."""
    count = instances(spec)
    # Where instances come and go, only a share is right whatever there is.
    scaled = spec.scaling is not None or spec.instance.managed is not None
    unit = "CAPACITY_PERCENT" if scaled else "INSTANCE_COUNT"
    if spec.update.policy == "rolling" and count > 1:
        policy = {"RollingUpdatePolicy": _rolling(spec, decision, count, unit)}
    else:
        policy = {
            "BlueGreenUpdatePolicy": {
                "TrafficRoutingConfiguration": _shift(spec, count, unit),
                "TerminationWaitInSeconds": spec.update.wait,
                "MaximumExecutionTimeoutInSeconds": _longest(spec, decision, 2),
            }
        }
    return {**policy, **_rollback(alarms)}


def component_deployment(
    spec: Spec, component: Component, decision: Decision, alarms: Sequence[Resource]
) -> dict[str, Any]:
    """UpdateInferenceComponent's DeploymentConfig; empty: the API's default, for what cannot roll."""
    if component.copies < 2 or spec.update.policy != "rolling":
        return {}
    unit = "CAPACITY_PERCENT" if spec.scaling is not None else "COPY_COUNT"
    return {"RollingUpdatePolicy": _rolling(spec, decision, component.copies, unit), **_rollback(alarms)}


def update_warnings(spec: Spec) -> tuple[str, ...]:
    """What a change of it will be like, where that is not what was asked for."""
    if spec.update.policy != "rolling":
        return ()
    said = []
    if instances(spec) == 1:
        said.append(
            "a single instance cannot be updated in batches of at most 50 %: an update starts a second one beside it, "
            "and needs that capacity and quota for a while"
        )
    if single := [component.name for component in spec.components if component.copies < 2]:
        said.append(f"{', '.join(single)}: a single copy cannot be updated in batches, nor be rolled back by alarms")
    return tuple(said)


def _rolling(spec: Spec, decision: Decision, count: int, unit: str) -> dict[str, Any]:
    size = _size(spec, count, unit)
    batches = math.ceil((100 if unit == "CAPACITY_PERCENT" else count) / size)
    return {
        "MaximumBatchSize": {"Type": unit, "Value": size},
        "WaitIntervalInSeconds": spec.update.wait,
        "MaximumExecutionTimeoutInSeconds": _longest(spec, decision, batches),
    }


def _size(spec: Spec, count: int, unit: str) -> int:
    """In per cent, or whole instances: at least one, at most half of two and more."""
    percent = spec.update.batch_percent
    return percent if unit == "CAPACITY_PERCENT" else max(1, count * percent // 100)


def _shift(spec: Spec, count: int, unit: str) -> dict[str, Any]:
    """A canary first where blue/green was asked for and there is room for one; else all at once."""
    shift: dict[str, Any] = {"Type": "ALL_AT_ONCE", "WaitIntervalInSeconds": spec.update.wait}
    if spec.update.policy == "blue_green" and count > 1:
        shift |= {"Type": "CANARY", "CanarySize": {"Type": unit, "Value": _size(spec, count, unit)}}
    return shift


def _longest(spec: Spec, decision: Decision, batches: int) -> int:
    """Seconds for all batches, each from finding instances to the end of its wait."""
    one = (decision.provision or _PROVISION) + decision.download + decision.startup + spec.update.wait
    return min(max(batches * one, _SHORTEST), _LONGEST)


def _rollback(alarms: Sequence[Resource]) -> dict[str, Any]:
    if not alarms:
        return {}
    return {"AutoRollbackConfiguration": {"Alarms": [{"AlarmName": alarm.name} for alarm in alarms[:_MOST_ALARMS]]}}
