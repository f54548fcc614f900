"""Settings of an update: in batches or all at once, and the alarms that trigger a rollback.

A batch must be 5 to 50 % of the instances or copies (RollingUpdatePolicy), so a single instance or copy cannot be
updated in batches.
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

_PROVISION = 900  # seconds to find instances if the specification has no timeout
_MOST_ALARMS = 10
_LEAST_PERCENT = 5  # minimum size of a batch, in percent of the instances or copies
_LONGEST = 28800  # seconds
_SHORTEST = 600  # seconds


def endpoint_deployment(spec: Spec, decision: Decision, alarms: Sequence[Resource]) -> dict[str, Any]:
    """Return the DeploymentConfig for UpdateEndpoint."""
    count = instances(spec)
    unit = _unit(spec)
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
    """Return the DeploymentConfig for UpdateInferenceComponent.

    It is empty (the API default) if the component is not updated in batches.
    """
    if component.copies < 2 or spec.update.policy != "rolling":
        return {}
    unit = "CAPACITY_PERCENT" if spec.scaling is not None else "COPY_COUNT"
    return {"RollingUpdatePolicy": _rolling(spec, decision, component.copies, unit), **_rollback(alarms)}


def update_warnings(spec: Spec) -> tuple[str, ...]:
    """Return a warning for each part of the deployment that cannot be updated in batches as specified."""
    if spec.update.policy != "rolling":
        return ()
    sentences = []
    if spec.endpoint is None and instances(spec) == 1:
        sentences.append(
            "a single instance cannot be updated in batches: an update starts a second instance, and temporarily needs "
            "its capacity and quota"
        )
    if single := [component.name for component in spec.components if component.copies < 2]:
        sentences.append(
            f"{', '.join(single)}: a single copy cannot be updated in batches, and alarms do not roll its updates back"
        )
    return tuple(sentences)


def num_batches(spec: Spec) -> int:
    """Return the number of batches in an update of the endpoint."""
    return _batches(spec, instances(spec), _unit(spec))


def _unit(spec: Spec) -> str:
    # If the number of instances changes, only a percentage stays correct.
    scaled = spec.scaling is not None or spec.instance.managed is not None
    return "CAPACITY_PERCENT" if scaled else "INSTANCE_COUNT"


def _rolling(spec: Spec, decision: Decision, count: int, unit: str) -> dict[str, Any]:
    return {
        "MaximumBatchSize": {"Type": unit, "Value": _size(spec, count, unit)},
        "WaitIntervalInSeconds": spec.update.wait,
        "MaximumExecutionTimeoutInSeconds": _longest(spec, decision, _batches(spec, count, unit)),
    }


def _batches(spec: Spec, count: int, unit: str) -> int:
    return math.ceil((100 if unit == "CAPACITY_PERCENT" else count) / _size(spec, count, unit))


def _size(spec: Spec, count: int, unit: str) -> int:
    """Return the batch size in percent, or as a number of instances or copies, rounded down but at least 5 %."""
    percent = spec.update.batch_percent
    least = math.ceil(count * _LEAST_PERCENT / 100)
    return percent if unit == "CAPACITY_PERCENT" else max(least, count * percent // 100)


def _shift(spec: Spec, count: int, unit: str) -> dict[str, Any]:
    """Return TrafficRoutingConfiguration: a canary for blue/green updates of several instances, or else all at once."""
    shift: dict[str, Any] = {"Type": "ALL_AT_ONCE", "WaitIntervalInSeconds": spec.update.wait}
    if spec.update.policy == "blue_green" and count > 1:
        shift |= {"Type": "CANARY", "CanarySize": {"Type": unit, "Value": _size(spec, count, unit)}}
    return shift


def _longest(spec: Spec, decision: Decision, batches: int) -> int:
    """Return the timeout of an update in seconds. In each batch, AWS finds instances, starts them and waits."""
    batch = (decision.provision or _PROVISION) + decision.start + spec.update.wait
    return min(max(batches * batch, _SHORTEST), _LONGEST)


def _rollback(alarms: Sequence[Resource]) -> dict[str, Any]:
    if not alarms:
        return {}
    return {"AutoRollbackConfiguration": {"Alarms": [{"AlarmName": alarm.name} for alarm in alarms[:_MOST_ALARMS]]}}
