"""PutMetricAlarm: what tells that an endpoint does badly. These also roll an update back (UpdateEndpoint's alarms)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deploy.names import VARIANT, beside
from deploy.resources import Kind, Resource
from deploy.spec import Spec

_PERIOD = 60  # seconds: SageMaker publishes these metrics once a minute
_MICROSECONDS = 1000.0  # in a millisecond: ModelLatency's unit


def endpoint_alarms(spec: Spec) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of the whole endpoint: names and requests without tags."""
    dimensions = {"EndpointName": spec.name, "VariantName": VARIANT}
    yield from _alarms(spec, (spec.name,), dimensions)


def component_alarms(spec: Spec, component: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from _alarms(spec, (spec.name, component), {"InferenceComponentName": component})


def as_resource(name: str, request: dict[str, Any], tags: list[dict[str, str]]) -> Resource:
    """CloudWatch takes an alarm on a metric that nobody has written yet, so it needs nothing to be there."""
    return Resource(Kind.ALARM, name, {**request, "Tags": tags})


def _alarms(spec: Spec, stem: tuple[str, ...], dimensions: dict[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    alarms = spec.alarms
    if alarms is None:
        return
    yield _alarm(spec, stem, "5xx", "Invocation5XXErrors", float(alarms.errors_5xx), {"Statistic": "Sum"}, dimensions)
    if spec.asynchronous is None:  # asynchronous endpoints do not publish it
        yield _alarm(
            spec,
            stem,
            "model-errors",
            "InvocationModelErrors",
            float(alarms.model_errors),
            {"Statistic": "Sum"},
            dimensions,
        )
    if alarms.latency_p95_ms is not None:
        threshold = alarms.latency_p95_ms * _MICROSECONDS
        yield _alarm(spec, stem, "latency", "ModelLatency", threshold, {"ExtendedStatistic": "p95"}, dimensions)


def _alarm(
    spec: Spec,
    stem: tuple[str, ...],
    suffix: str,
    metric: str,
    threshold: float,
    statistic: dict[str, str],
    dimensions: dict[str, str],
) -> tuple[str, dict[str, Any]]:
    name = beside(*stem, suffix)
    request: dict[str, Any] = {
        "AlarmName": name,
        "AlarmDescription": f"{metric} of {stem[-1]}; rolls an update of it back.",
        "Namespace": "AWS/SageMaker",
        "MetricName": metric,
        "Dimensions": [{"Name": key, "Value": value} for key, value in dimensions.items()],
        **statistic,
        "Period": _PERIOD,
        "EvaluationPeriods": 1,
        "Threshold": threshold,
        "ComparisonOperator": "GreaterThanOrEqualToThreshold",
        "TreatMissingData": "notBreaching",  # without requests there is no metric, and nothing wrong
    }
    if spec.alarms is not None and spec.alarms.notify is not None:
        request["AlarmActions"] = [spec.alarms.notify]
    return name, request
