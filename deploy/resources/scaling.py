"""Build automatic scaling: copies or instances by concurrent requests, and the step that wakes from zero.

The metrics arrive every ten seconds (high-resolution metrics of Application Auto Scaling). Target tracking creates
alarms of its own, which this project does not manage.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deploy.resources.names import scoped_name, tag_map
from deploy.resources.resource import Kind, Ref, Resource
from deploy.spec import Spec

_NO_CAPACITY_PERIOD = 30  # seconds until a refused request wakes a copy
_WAKE_COOLDOWN = 60


def scaling(spec: Spec, scaled: Resource, tags: list[dict[str, str]]) -> Iterator[Resource]:
    """Build the scalable target, the tracking policy, and the alarm that wakes a sleeping component or endpoint."""
    if spec.scaling is None:
        return
    component = scaled.kind is Kind.COMPONENT
    place = {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"{'inference-component' if component else 'endpoint'}/{scaled.name}",
        "ScalableDimension": "sagemaker:inference-component:DesiredCopyCount",
    }
    if not component:
        place["ResourceId"] += f"/variant/{spec.instance.variant}"
        place["ScalableDimension"] = "sagemaker:variant:DesiredInstanceCount"
    target = Resource(
        Kind.SCALABLE_TARGET,
        place["ResourceId"],
        {**place, "MinCapacity": spec.scaling.min, "MaxCapacity": spec.scaling.max, "Tags": tag_map(tags)},
        needs=(scaled.key,),
    )
    yield target
    yield _policy(
        scoped_name(*_stem(spec, scaled), "concurrency"),
        place,
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
        yield from _waking(spec, scaled, place, target, tags)


def _metric(spec: Spec, *, component: bool) -> dict[str, Any]:
    if spec.asynchronous is not None:  # asynchronous endpoints publish their queue, not concurrent requests
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


def _waking(
    spec: Spec, scaled: Resource, place: dict[str, str], target: Resource, tags: list[dict[str, str]]
) -> Iterator[Resource]:
    """Build the step that leaves zero: without a copy there is no metric to track; a refused request adds the first."""
    policy = _policy(
        scoped_name(*_stem(spec, scaled), "wake"),
        place,
        target,
        {
            "PolicyType": "StepScaling",
            "StepScalingPolicyConfiguration": {
                "AdjustmentType": "ChangeInCapacity",
                "MetricAggregationType": "Maximum",
                "Cooldown": _WAKE_COOLDOWN,
                "StepAdjustments": [{"MetricIntervalLowerBound": 0.0, "ScalingAdjustment": 1}],
            },
        },
    )
    yield policy
    name = scoped_name(*_stem(spec, scaled), "no-capacity")
    request = {
        "AlarmName": name,
        "AlarmDescription": f"A request found no copy of {scaled.name}: adds one.",
        "Namespace": "AWS/SageMaker",
        "MetricName": "NoCapacityInvocationFailures",
        "Dimensions": [{"Name": "InferenceComponentName", "Value": scaled.name}],
        "Statistic": "Sum",
        "Period": _NO_CAPACITY_PERIOD,
        "EvaluationPeriods": 1,
        "DatapointsToAlarm": 1,
        "Threshold": 1.0,
        "ComparisonOperator": "GreaterThanOrEqualToThreshold",
        "TreatMissingData": "notBreaching",
        "AlarmActions": [Ref(policy.key, "PolicyARN")],
        "Tags": tags,
    }
    yield Resource(Kind.ALARM, name, request, needs=(policy.key,))


def _stem(spec: Spec, scaled: Resource) -> tuple[str, ...]:
    return (spec.name, scaled.name) if scaled.kind is Kind.COMPONENT else (spec.name,)


def _policy(name: str, place: dict[str, str], target: Resource, rule: dict[str, Any]) -> Resource:
    return Resource(Kind.SCALING_POLICY, name, {"PolicyName": name, **place, **rule}, needs=(target.key,))
