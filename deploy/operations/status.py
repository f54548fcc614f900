"""The status of an endpoint: its components, scaling, alarms and recent metrics, as values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any

from botocore.exceptions import ClientError

from deploy.aws import Aws, components_of, error_code, pages, unless_missing
from deploy.errors import NotThere

MINUTES = 15
"""Period of the metrics, in minutes."""

_NAMESPACE = "AWS/SageMaker"
_ACTIVITIES = 3


@dataclass(frozen=True)
class Variant:
    """A variant: `type` None: AWS chooses; `image`: what runs, by digest if known."""

    name: str
    instances: int
    desired: int
    type: str | None = None
    image: str = ""


@dataclass(frozen=True)
class Component:
    """Copies of a model, or (with `base`) an adapter.

    Attributes:
        model: the model's name in AWS, or the image.
        gpus: GPUs of one copy; 0: none.
    """

    name: str
    status: str
    copies: int
    desired: int
    base: str | None = None
    reason: str = ""
    model: str = ""
    gpus: int = 0


@dataclass(frozen=True)
class Scaling:
    """Automatic scaling. `target`: its ResourceId; `activities`: the last ones, newest first."""

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
    """The status of an endpoint.

    Attributes:
        status: AWS's status.
        reason: FailureReason.
        config: the endpoint configuration that serves.
        metrics: of the last `MINUTES` minutes, by name; None: no requests. Latencies in milliseconds.
        asynchronous: whether requests wait in a queue.
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
    asynchronous: bool = False

    @property
    def asleep(self) -> bool:
        """Return whether it is an asynchronous endpoint without an instance: requests wait until there is one."""
        return self.asynchronous and not any(variant.instances for variant in self.variants)

    @property
    def serving(self) -> bool:
        """Return whether a request would be answered: in service, with instances or copies, or with a queue before
        them.
        """
        if self.status not in ("InService", "Updating", "SystemUpdating", "RollingBack"):
            return False
        if self.components:
            return any(item.status == "InService" and item.copies > 0 for item in self.components if item.base is None)
        return self.asleep or any(variant.instances > 0 for variant in self.variants)


def look(aws: Aws, name: str) -> Status:
    """Read the status.

    Raises:
        NotThere: there is no endpoint of that name.
    """
    endpoint = endpoint_of(aws, name)
    components = tuple(_components(aws, name))
    unread: list[str] = []
    targets = [f"endpoint/{name}/variant/{item['VariantName']}" for item in endpoint.get("ProductionVariants", [])]
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
        scaling=_read_if_allowed(lambda: tuple(_with_activities(aws, targets)), "scaling", unread),
        alarms=_read_if_allowed(lambda: tuple(_alarms(aws, name)), "alarms", unread),
        metrics=dict(_read_if_allowed(lambda: tuple(_metrics(aws, endpoint).items()), "metrics", unread)),
        unread=tuple(unread),
        asynchronous="AsyncInferenceConfig" in endpoint,
    )


def endpoint_of(aws: Aws, name: str) -> dict[str, Any]:
    """Describe the endpoint.

    Raises:
        NotThere: there is no endpoint of that name.
    """
    found = unless_missing(lambda: aws.client("sagemaker").describe_endpoint(EndpointName=name))
    if found is None:
        raise NotThere(f"there is no endpoint {name!r} in {aws.region}", "Check --region.")
    return dict(found)


def scaling_of(aws: Aws, targets: list[str]) -> Iterator[Scaling]:
    """Yield the automatic scaling of the targets, without activities."""
    scaling = aws.client("application-autoscaling")
    if not targets:
        return
    result = scaling.describe_scalable_targets(ServiceNamespace="sagemaker", ResourceIds=targets)
    for target in result["ScalableTargets"]:
        named = target["ResourceId"]
        policies = scaling.describe_scaling_policies(ServiceNamespace="sagemaker", ResourceId=named)["ScalingPolicies"]
        names = tuple(policy["PolicyName"] for policy in policies)
        yield Scaling(named, target["MinCapacity"], target["MaxCapacity"], names)


def _with_activities(aws: Aws, targets: list[str]) -> Iterator[Scaling]:
    for item in scaling_of(aws, targets):
        description = aws.client("application-autoscaling").describe_scaling_activities(
            ServiceNamespace="sagemaker", ResourceId=item.target, MaxResults=_ACTIVITIES
        )
        lines = (
            f"{act['StartTime']:%H:%M} {act['StatusCode']}: {act['Description']}"
            for act in description["ScalingActivities"]
        )
        yield replace(item, activities=tuple(lines))


def _variants(aws: Aws, endpoint: Mapping[str, Any]) -> Iterator[Variant]:
    config = endpoint.get("EndpointConfigName")
    types: dict[str, str | None] = {}
    if config:
        description = aws.client("sagemaker").describe_endpoint_config(EndpointConfigName=config)
        types = {item["VariantName"]: _types(item) for item in _with_shadows(description)}
    for item in _with_shadows(endpoint):
        images = [
            image.get("ResolvedImage") or image.get("SpecifiedImage", "") for image in item.get("DeployedImages", [])
        ]
        yield Variant(
            item["VariantName"],
            item.get("CurrentInstanceCount", 0),
            item.get("DesiredInstanceCount", 0),
            _in_pools(item) or types.get(item["VariantName"]),
            images[0] if images else "",
        )


def _with_shadows(description: Mapping[str, Any]) -> list[Any]:
    return [*description.get("ProductionVariants", ()), *description.get("ShadowProductionVariants", ())]


def _types(variant: Mapping[str, Any]) -> str | None:
    pools = sorted(variant.get("InstancePools", ()), key=lambda pool: int(pool["Priority"]))
    return " or ".join(pool["InstanceType"] for pool in pools) or variant.get("InstanceType")


def _in_pools(variant: Mapping[str, Any]) -> str:
    """Return how many instances each type of a variant with pools has."""
    pools = variant.get("InstancePools", ())
    return ", ".join(f"{pool['CurrentInstanceCount']} x {pool['InstanceType']}" for pool in pools)


def _components(aws: Aws, name: str) -> Iterator[Component]:
    for component in components_of(aws, name):
        description = aws.client("sagemaker").describe_inference_component(InferenceComponentName=component)
        runtime, specification = description.get("RuntimeConfig", {}), description.get("Specification", {})
        image = specification.get("Container", {}).get("DeployedImage", {}).get("SpecifiedImage", "")
        yield Component(
            component,
            description["InferenceComponentStatus"],
            runtime.get("CurrentCopyCount", 0),
            runtime.get("DesiredCopyCount", 0),
            specification.get("BaseInferenceComponentName"),
            description.get("FailureReason", ""),
            specification.get("ModelName") or image,
            int(specification.get("ComputeResourceRequirements", {}).get("NumberOfAcceleratorDevicesRequired", 0)),
        )


def _alarms(aws: Aws, name: str) -> Iterator[Alarm]:
    for alarm in pages(aws, "cloudwatch", "describe_alarms", "MetricAlarms", AlarmNamePrefix=f"{name}/"):
        yield Alarm(alarm["AlarmName"], alarm["StateValue"], alarm.get("StateReason", ""))


_METRICS = {
    "invocations": ("Invocations", "Sum", 1.0),
    "errors_4xx": ("Invocation4XXErrors", "Sum", 1.0),
    "errors_5xx": ("Invocation5XXErrors", "Sum", 1.0),
    "model_errors": ("InvocationModelErrors", "Sum", 1.0),
    "latency_p50_ms": ("ModelLatency", "p50", 1e-3),
    "latency_p95_ms": ("ModelLatency", "p95", 1e-3),
}
"""Metric by our name: CloudWatch's name, statistic, and a factor (CloudWatch counts microseconds)."""


def _metrics(aws: Aws, endpoint: Mapping[str, Any]) -> dict[str, float | None]:
    """Read the metrics of the first variant: our endpoints have one."""
    variants = endpoint.get("ProductionVariants", [])
    if not variants:
        return {}
    dimensions = [
        {"Name": "EndpointName", "Value": endpoint["EndpointName"]},
        {"Name": "VariantName", "Value": variants[0]["VariantName"]},
    ]
    # CloudWatch aligns periods to this grid.
    end = datetime.now(timezone.utc).replace(second=0, microsecond=0) + timedelta(minutes=1)
    asked = [
        {
            "Id": own_name,
            "MetricStat": {
                "Metric": {"Namespace": _NAMESPACE, "MetricName": metric, "Dimensions": dimensions},
                "Period": MINUTES * 60,
                "Stat": statistic,
            },
        }
        for own_name, (metric, statistic, _) in _METRICS.items()
    ]
    got = aws.client("cloudwatch").get_metric_data(
        MetricDataQueries=asked, StartTime=end - timedelta(minutes=MINUTES), EndTime=end
    )
    values = {item["Id"]: item["Values"] for item in got["MetricDataResults"] if item["Values"]}
    # The minutes may lie in two periods: take the worse percentile.
    return {
        own_name: (sum if statistic == "Sum" else max)(values[own_name]) * by if own_name in values else None
        for own_name, (_, statistic, by) in _METRICS.items()
    }


def _read_if_allowed(read: Any, what: str, unread: list[str]) -> Any:
    """Return what `read` returns; empty, with a note in `unread`, if the caller has no permission."""
    try:
        return read()
    except ClientError as error:
        unread.append(f"{what}: {error_code(error)}")
        return ()
