"""Functions that build automatic scaling by concurrent requests, scaling from zero, and CloudWatch alarms.

Scaling uses Application Auto Scaling's high-resolution metrics, which are published every ten seconds. Target tracking
creates its own alarms, which this project does not manage.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from deploy.resources.resource import DIMENSIONS, Kind, Ref, Resource, scoped_name, tag_map
from deploy.spec import Spec
from deploy.spec.sections import Alarms

_ALARM = {"Namespace": "AWS/SageMaker", "ComparisonOperator": "GreaterThanOrEqualToThreshold"}
"""Fields that all alarms share."""

_NO_CAPACITY_PERIOD = 30  # seconds; a failed request adds a copy after at most this time
_QUEUE_COOLDOWN = 900
"""Cooldown in seconds. With the 300 s in AWS's guide, an instance that takes longer to start would cause another to be
added. Target tracking needs 15 minutes to scale to zero again, so this cooldown never delays scaling from zero."""


def scaling(spec: Spec, scaled: Resource, tags: list[dict[str, str]]) -> Iterator[Resource]:
    """Build the scalable target, the target tracking policy, and the policy and alarm that scale from zero."""
    if spec.scaling is None:
        return
    component = scaled.kind is Kind.COMPONENT
    ids = {"ServiceNamespace": "sagemaker", "ResourceId": scaled.key, "ScalableDimension": DIMENSIONS[scaled.kind]}
    if not component:
        ids["ResourceId"] += f"/variant/{spec.instance.variant}"
    target = Resource(
        Kind.SCALABLE_TARGET,
        ids["ResourceId"],
        {**ids, "MinCapacity": spec.scaling.min, "MaxCapacity": spec.scaling.max, "Tags": tag_map(tags)},
        needs=(scaled.key,),
    )
    yield target
    yield _policy(
        scoped_name(*_stem(spec, scaled), "concurrency"),
        ids,
        target,
        {
            "PolicyType": "TargetTrackingScaling",
            "TargetTrackingScalingPolicyConfiguration": {
                "TargetValue": float(spec.scaling.concurrency),
                **_metric(spec, component=component),
                "ScaleInCooldown": spec.scaling.scale_in_cooldown,
                "ScaleOutCooldown": spec.scaling.scale_out_cooldown,
            },
        },
    )
    if spec.scaling.min == 0:
        yield from _waking(spec, scaled, ids, target, tags)


def _metric(spec: Spec, *, component: bool) -> dict[str, Any]:
    if spec.asynchronous is not None:  # asynchronous endpoints publish their queue's length, not concurrent requests
        return {
            "CustomizedMetricSpecification": {
                "MetricName": "ApproximateBacklogSizePerInstance",
                "Namespace": "AWS/SageMaker",
                "Dimensions": [{"Name": "EndpointName", "Value": spec.name}],
                "Statistic": "Average",
            }
        }
    name = "InferenceComponentConcurrentRequestsPerCopy" if component else "VariantConcurrentRequestsPerModel"
    return {"PredefinedMetricSpecification": {"PredefinedMetricType": f"SageMaker{name}HighResolution"}}


class _Waking(NamedTuple):
    """Settings that scale a component or endpoint from zero, as in AWS's guides.

    Attributes:
        suffix: suffix of the alarm name.
        alarm: fields of the alarm.
        aggregation: the MetricAggregationType of the policy.
        cooldown: cooldown of the policy in seconds.
    """

    suffix: str
    alarm: dict[str, Any]
    aggregation: str
    cooldown: int


def _waking(
    spec: Spec, scaled: Resource, ids: dict[str, str], target: Resource, tags: list[dict[str, str]]
) -> Iterator[Resource]:
    """Build the step scaling policy that adds the first instance or copy, and the alarm that triggers it.

    Target tracking cannot scale from zero, because its metric is not published without instances or copies.
    """
    assert spec.scaling is not None
    between = spec.scaling.scale_out_cooldown
    wakes = _component(scaled, between) if scaled.kind is Kind.COMPONENT else _queue(scaled, between)
    policy = _policy(
        scoped_name(*_stem(spec, scaled), "wake"),
        ids,
        target,
        {
            "PolicyType": "StepScaling",
            "StepScalingPolicyConfiguration": {
                "AdjustmentType": "ChangeInCapacity",
                "MetricAggregationType": wakes.aggregation,
                "Cooldown": wakes.cooldown,
                "StepAdjustments": [{"MetricIntervalLowerBound": 0.0, "ScalingAdjustment": 1}],
            },
        },
    )
    yield policy
    name = scoped_name(*_stem(spec, scaled), wakes.suffix)
    request = {"AlarmName": name, **_ALARM, **wakes.alarm, "AlarmActions": [Ref(policy.key, "PolicyARN")], "Tags": tags}
    yield Resource(Kind.ALARM, name, request, needs=(policy.key,))


def _component(scaled: Resource, between: int) -> _Waking:
    alarm = {
        "AlarmDescription": f"A request found no copy of {scaled.name}: add one.",
        "MetricName": "NoCapacityInvocationFailures",
        "Dimensions": [{"Name": "InferenceComponentName", "Value": scaled.name}],
        "Statistic": "Sum",
        "Period": _NO_CAPACITY_PERIOD,
        "EvaluationPeriods": 1,
        "DatapointsToAlarm": 1,
        "Threshold": 1.0,
        "TreatMissingData": "notBreaching",
    }
    return _Waking("no-capacity", alarm, "Maximum", between)


def _queue(scaled: Resource, between: int) -> _Waking:
    """Return the settings for an asynchronous endpoint. The metric stays 1 until the first instance serves."""
    alarm = {
        "AlarmDescription": f"Requests wait and {scaled.name} has no instance: add one.",
        "MetricName": "HasBacklogWithoutCapacity",
        "Dimensions": [{"Name": "EndpointName", "Value": scaled.name}],
        "Statistic": "Average",
        "Period": 60,
        "EvaluationPeriods": 2,
        "DatapointsToAlarm": 2,
        "Threshold": 1.0,
        "TreatMissingData": "missing",
    }
    return _Waking("backlog", alarm, "Average", max(between, _QUEUE_COOLDOWN))


def _stem(spec: Spec, scaled: Resource) -> tuple[str, ...]:
    return (spec.name, scaled.name) if scaled.kind is Kind.COMPONENT else (spec.name,)


def _policy(name: str, ids: dict[str, str], target: Resource, rule: dict[str, Any]) -> Resource:
    return Resource(Kind.SCALING_POLICY, name, {"PolicyName": name, **ids, **rule}, needs=(target.key,))


# -- CloudWatch alarms (PutMetricAlarm), which also trigger the automatic rollback of an update ------------------------


_PERIOD = 60  # seconds; SageMaker publishes these metrics once a minute
_MICROSECONDS = 1000.0  # microseconds (the unit of ModelLatency) per millisecond
_SUM = {"Statistic": "Sum"}


class _Watch(NamedTuple):
    """A metric, and the threshold for its alarm in the metric's unit. `statistic` is a field of PutMetricAlarm."""

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
    """Build the alarms of one component. If it can scale to zero, requests without a copy cause no alarm."""
    if spec.alarms is None:
        return []
    watches = [*_watches(spec.alarms, asynchronous=False)]
    if spec.scaling is None or spec.scaling.min > 0:
        watches.append(_Watch("no-capacity", "NoCapacityInvocationFailures", 1.0))
    dimensions = {"InferenceComponentName": component}
    return [_alarm(spec.alarms, (spec.name, component), watch, dimensions, tags) for watch in watches]


def _watches(alarms: Alarms, *, asynchronous: bool) -> Iterator[_Watch]:
    yield _Watch("5xx", "Invocation5XXErrors", float(alarms.errors_5xx))
    if not asynchronous:  # asynchronous endpoints do not publish this metric
        yield _Watch("model-errors", "InvocationModelErrors", float(alarms.model_errors))
    if alarms.latency_p95_ms is not None:
        yield _Watch("latency", "ModelLatency", alarms.latency_p95_ms * _MICROSECONDS, {"ExtendedStatistic": "p95"})


def _alarm(
    alarms: Alarms, stem: tuple[str, ...], watch: _Watch, dimensions: dict[str, str], tags: list[dict[str, str]]
) -> Resource:
    """Build one alarm. CloudWatch accepts alarms on metrics without data, so the alarm needs no other resource."""
    name = scoped_name(*stem, watch.suffix)
    request: dict[str, Any] = {
        "AlarmName": name,
        **_ALARM,
        "AlarmDescription": f"{watch.metric} of {stem[-1]}; rolls back an update of it.",
        "MetricName": watch.metric,
        "Dimensions": [{"Name": key, "Value": value} for key, value in dimensions.items()],
        **watch.statistic,
        "Period": _PERIOD,
        "EvaluationPeriods": 1,
        "Threshold": watch.threshold,
        "TreatMissingData": "notBreaching",  # without requests, the metric has no data
    }
    if alarms.notify is not None:
        request["AlarmActions"] = [alarms.notify]
    return Resource(Kind.ALARM, name, {**request, "Tags": tags})
