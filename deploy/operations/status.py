"""How an endpoint is: all that AWS says of it, its components, its scaling, alarms and last minutes, as values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any

from botocore.exceptions import ClientError

from deploy.aws import Aws, error_code, is_missing
from deploy.errors import NotThere

MINUTES = 15
"""That the metrics are of."""

_NAMESPACE = "AWS/SageMaker"
_ACTIVITIES = 3


@dataclass(frozen=True)
class Variant:
    """Instances that are alike. `type` is None where AWS chooses; `image` what runs there, by digest where known."""

    name: str
    instances: int
    desired: int
    type: str | None = None
    image: str = ""


@dataclass(frozen=True)
class Component:
    """Copies of a model, or (`base` given) an adapter beside them."""

    name: str
    status: str
    copies: int
    desired: int
    base: str | None = None
    reason: str = ""


@dataclass(frozen=True)
class Scaling:
    """What Application Auto Scaling may do. `target`: its ResourceId; `activities`: the last ones, newest first."""

    target: str
    min: int
    max: int
    policies: tuple[str, ...] = ()
    activities: tuple[str, ...] = ()


@dataclass(frozen=True)
class Alarm:
    name: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class Status:
    """An endpoint.

    Attributes:
        status: AWS's word; `reason`: FailureReason.
        config: the endpoint configuration that serves.
        metrics: of the last `MINUTES` minutes, by name; None: no request came. Latencies are in milliseconds.
    """

    name: str
    region: str
    status: str
    reason: str
    config: str
    changed: str
    variants: tuple[Variant, ...]
    components: tuple[Component, ...]
    scaling: tuple[Scaling, ...]
    alarms: tuple[Alarm, ...]
    metrics: Mapping[str, float | None]
    unread: tuple[str, ...] = ()

    @property
    def serving(self) -> bool:
        """Whether a request would be answered: in service, with instances, or with copies of a component."""
        if self.status not in ("InService", "Updating", "SystemUpdating", "RollingBack"):
            return False
        if self.components:
            return any(one.status == "InService" and one.copies > 0 for one in self.components if one.base is None)
        return any(variant.instances > 0 for variant in self.variants)


def look(aws: Aws, name: str) -> Status:
    """How the endpoint is now.

    Raises:
        NotThere: there is none of that name.
    """
    endpoint = endpoint_of(aws, name)
    components = tuple(_components(aws, name))
    unread: list[str] = []
    targets = [f"endpoint/{name}/variant/{one['VariantName']}" for one in endpoint.get("ProductionVariants", [])]
    targets += [f"inference-component/{component.name}" for component in components if component.base is None]
    return Status(
        name=name,
        region=aws.region,
        status=endpoint["EndpointStatus"],
        reason=endpoint.get("FailureReason", ""),
        config=endpoint.get("EndpointConfigName", ""),
        changed=endpoint["LastModifiedTime"].astimezone(timezone.utc).isoformat(timespec="seconds"),
        variants=tuple(_variants(aws, endpoint)),
        components=components,
        scaling=_allowed(lambda: tuple(_with_activities(aws, targets)), "scaling", unread),
        alarms=_allowed(lambda: tuple(_alarms(aws, name)), "alarms", unread),
        metrics=dict(_allowed(lambda: tuple(_metrics(aws, endpoint).items()), "metrics", unread)),
        unread=tuple(unread),
    )


def endpoint_of(aws: Aws, name: str) -> dict[str, Any]:
    """What DescribeEndpoint says.

    Raises:
        NotThere: there is none of that name.
    """
    try:
        found: dict[str, Any] = aws.client("sagemaker").describe_endpoint(EndpointName=name)
    except ClientError as error:
        if is_missing(error):
            raise NotThere(f"there is no endpoint {name!r} in {aws.region}", "Look at --region.") from None
        raise
    return found


def components_of(aws: Aws, name: str) -> list[str]:
    """The names of the endpoint's components, adapters too."""
    pages = aws.client("sagemaker").get_paginator("list_inference_components").paginate(EndpointNameEquals=name)
    return [one["InferenceComponentName"] for page in pages for one in page["InferenceComponents"]]


def scaling_of(aws: Aws, targets: list[str]) -> Iterator[Scaling]:
    """Those of the targets that are scaled, without their activities."""
    scaling = aws.client("application-autoscaling")
    if not targets:
        return
    found = scaling.describe_scalable_targets(ServiceNamespace="sagemaker", ResourceIds=targets)
    for target in found["ScalableTargets"]:
        named = target["ResourceId"]
        policies = scaling.describe_scaling_policies(ServiceNamespace="sagemaker", ResourceId=named)["ScalingPolicies"]
        names = tuple(policy["PolicyName"] for policy in policies)
        yield Scaling(named, target["MinCapacity"], target["MaxCapacity"], names)


def _with_activities(aws: Aws, targets: list[str]) -> Iterator[Scaling]:
    for one in scaling_of(aws, targets):
        said = aws.client("application-autoscaling").describe_scaling_activities(
            ServiceNamespace="sagemaker", ResourceId=one.target, MaxResults=_ACTIVITIES
        )
        lines = (
            f"{act['StartTime']:%H:%M} {act['StatusCode']}: {act['Description']}" for act in said["ScalingActivities"]
        )
        yield replace(one, activities=tuple(lines))


def _variants(aws: Aws, endpoint: Mapping[str, Any]) -> Iterator[Variant]:
    config = endpoint.get("EndpointConfigName")
    types: dict[str, str | None] = {}
    if config:
        said = aws.client("sagemaker").describe_endpoint_config(EndpointConfigName=config)
        types = {one["VariantName"]: one.get("InstanceType") for one in said["ProductionVariants"]}
    for one in endpoint.get("ProductionVariants", []):
        images = [
            image.get("ResolvedImage") or image.get("SpecifiedImage", "") for image in one.get("DeployedImages", [])
        ]
        yield Variant(
            one["VariantName"],
            one.get("CurrentInstanceCount", 0),
            one.get("DesiredInstanceCount", 0),
            types.get(one["VariantName"]),
            images[0] if images else "",
        )


def _components(aws: Aws, name: str) -> Iterator[Component]:
    for component in components_of(aws, name):
        said = aws.client("sagemaker").describe_inference_component(InferenceComponentName=component)
        runtime = said.get("RuntimeConfig", {})
        yield Component(
            component,
            said["InferenceComponentStatus"],
            runtime.get("CurrentCopyCount", 0),
            runtime.get("DesiredCopyCount", 0),
            said.get("Specification", {}).get("BaseInferenceComponentName"),
            said.get("FailureReason", ""),
        )


def _alarms(aws: Aws, name: str) -> Iterator[Alarm]:
    pages = aws.client("cloudwatch").get_paginator("describe_alarms").paginate(AlarmNamePrefix=f"{name}/")
    for page in pages:
        for alarm in page["MetricAlarms"]:
            yield Alarm(alarm["AlarmName"], alarm["StateValue"], alarm.get("StateReason", ""))


_METRICS = {
    "invocations": ("Invocations", "Sum", 1.0),
    "errors_4xx": ("Invocation4XXErrors", "Sum", 1.0),
    "errors_5xx": ("Invocation5XXErrors", "Sum", 1.0),
    "model_errors": ("InvocationModelErrors", "Sum", 1.0),
    "latency_p50_ms": ("ModelLatency", "p50", 1e-3),
    "latency_p95_ms": ("ModelLatency", "p95", 1e-3),
}
"""Ours to CloudWatch's name and statistic, and what its value is multiplied by (it counts microseconds)."""


def _metrics(aws: Aws, endpoint: Mapping[str, Any]) -> dict[str, float | None]:
    """Of the first variant: an endpoint of ours has one."""
    variants = endpoint.get("ProductionVariants", [])
    if not variants:
        return {}
    dimensions = [
        {"Name": "EndpointName", "Value": endpoint["EndpointName"]},
        {"Name": "VariantName", "Value": variants[0]["VariantName"]},
    ]
    end = datetime.now(timezone.utc).replace(second=0, microsecond=0) + timedelta(minutes=1)  # CloudWatch's own grid
    asked = [
        {
            "Id": ours,
            "MetricStat": {
                "Metric": {"Namespace": _NAMESPACE, "MetricName": metric, "Dimensions": dimensions},
                "Period": MINUTES * 60,
                "Stat": statistic,
            },
        }
        for ours, (metric, statistic, _) in _METRICS.items()
    ]
    got = aws.client("cloudwatch").get_metric_data(
        MetricDataQueries=asked, StartTime=end - timedelta(minutes=MINUTES), EndTime=end
    )
    values = {one["Id"]: one["Values"] for one in got["MetricDataResults"] if one["Values"]}
    return {
        ours: (sum if statistic == "Sum" else max)(values[ours]) * by if ours in values else None
        for ours, (_, statistic, by) in _METRICS.items()
    }  # a stretch may lie across two periods: then the worse percentile


def _allowed(read: Any, what: str, unread: list[str]) -> Any:
    """What `read` gives; empty, and said so, where the caller may not read it."""
    try:
        return read()
    except ClientError as error:
        unread.append(f"{what}: {error_code(error)}")
        return ()
