"""Build CloudWatch alarms (PutMetricAlarm). They also trigger the automatic rollback of an update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from deploy.resources.names import scoped_name
from deploy.resources.resource import Kind, Resource
from deploy.spec import Spec
from deploy.spec.sections import Alarms

_PERIOD = 60  # seconds: SageMaker publishes these metrics once a minute
_MICROSECONDS = 1000.0  # microseconds (ModelLatency's unit) in a millisecond
_SUM = {"Statistic": "Sum"}


class _Watch(NamedTuple):
    """A metric and its threshold."""

    suffix: str
    metric: str
    threshold: float
    statistic: dict[str, str] = _SUM


def endpoint_alarms(spec: Spec, tags: list[dict[str, str]]) -> list[Resource]:
    """Build the alarms of the endpoint."""
    if spec.alarms is None:
        return []
    dimensions = {"EndpointName": spec.name, "VariantName": spec.instance.variant}
    watches = _watches(spec.alarms, asynchronous=spec.asynchronous is not None)
    return [_alarm(spec.alarms, (spec.name,), watch, dimensions, tags) for watch in watches]


def component_alarms(spec: Spec, component: str, tags: list[dict[str, str]]) -> list[Resource]:
    """Build the alarms of one component. "No copy" is an alarm only where the component cannot sleep."""
    if spec.alarms is None:
        return []
    watches = [*_watches(spec.alarms, asynchronous=False)]
    if spec.scaling is None or spec.scaling.min > 0:
        watches.append(_Watch("no-capacity", "NoCapacityInvocationFailures", 1.0))
    dimensions = {"InferenceComponentName": component}
    return [_alarm(spec.alarms, (spec.name, component), watch, dimensions, tags) for watch in watches]


def _watches(alarms: Alarms, *, asynchronous: bool) -> Iterator[_Watch]:
    yield _Watch("5xx", "Invocation5XXErrors", float(alarms.errors_5xx))
    if not asynchronous:  # asynchronous endpoints do not publish it
        yield _Watch("model-errors", "InvocationModelErrors", float(alarms.model_errors))
    if alarms.latency_p95_ms is not None:
        yield _Watch("latency", "ModelLatency", alarms.latency_p95_ms * _MICROSECONDS, {"ExtendedStatistic": "p95"})


def _alarm(
    alarms: Alarms, stem: tuple[str, ...], watch: _Watch, dimensions: dict[str, str], tags: list[dict[str, str]]
) -> Resource:
    """Build one alarm. CloudWatch accepts alarms on metrics without data, so it needs no other resource."""
    name = scoped_name(*stem, watch.suffix)
    request: dict[str, Any] = {
        "AlarmName": name,
        "AlarmDescription": f"{watch.metric} of {stem[-1]}; rolls an update of it back.",
        "Namespace": "AWS/SageMaker",
        "MetricName": watch.metric,
        "Dimensions": [{"Name": key, "Value": value} for key, value in dimensions.items()],
        **watch.statistic,
        "Period": _PERIOD,
        "EvaluationPeriods": 1,
        "Threshold": watch.threshold,
        "ComparisonOperator": "GreaterThanOrEqualToThreshold",
        "TreatMissingData": "notBreaching",  # without requests there is no metric, and no problem
    }
    if alarms.notify is not None:
        request["AlarmActions"] = [alarms.notify]
    return Resource(Kind.ALARM, name, {**request, "Tags": tags})
