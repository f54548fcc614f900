"""The status of an endpoint: its variants, components, scaling, alarms and recent metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

from botocore.exceptions import ClientError

from deploy.aws import Aws, components_of, error_code, pages, unless_missing, variants_of
from deploy.errors import NotThere

MINUTES = 15
"""Length of the period that the metrics cover, in minutes."""

_NAMESPACE = "AWS/SageMaker"
_ACTIVITIES = 3


@dataclass(frozen=True)
class Variant:
    """A variant of an endpoint.

    Attributes:
        instances: current number of instances.
        type: instance types of the variant, or None if they are not known.
        image: the URI of the running image, with its digest if known.
    """

    name: str
    instances: int
    desired: int
    type: str | None = None
    image: str = ""


@dataclass(frozen=True)
class ComponentStatus:
    """An inference component, which serves either copies of a model or an adapter.

    Attributes:
        status: the InferenceComponentStatus.
        copies: current number of copies.
        base: name of the base component if this is an adapter, or None.
        reason: the FailureReason, or empty.
        model: name of the model in SageMaker, or the image URI.
        gpus: number of GPUs of each copy.
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
class ScalingStatus:
    """Automatic scaling of a variant or component.

    Attributes:
        target: the ResourceId of the scalable target.
        policies: names of the scaling policies.
        wakes: whether a policy can scale from zero, which target tracking cannot.
        activities: descriptions of the most recent scaling activities, newest first.
    """

    target: str
    min: int
    max: int
    policies: tuple[str, ...] = ()
    wakes: bool = False
    activities: tuple[str, ...] = ()


@dataclass(frozen=True)
class Alarm:
    name: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class EndpointStatus:
    """The status of an endpoint.

    Attributes:
        status: the EndpointStatus.
        reason: the FailureReason, or empty.
        config: name of the current endpoint configuration.
        changed: time of the last change, in ISO 8601.
        metrics: metrics of the last `MINUTES` minutes by name, or None if there were no requests. Latencies are in
            milliseconds.
        unread: parts that could not be read for lack of permission, each with AWS's error code.
        asynchronous: whether the endpoint is for asynchronous requests, which wait in a queue.
    """

    name: str
    region: str
    status: str
    reason: str
    config: str
    changed: str
    variants: tuple[Variant, ...]
    components: tuple[ComponentStatus, ...]
    scaling: tuple[ScalingStatus, ...]
    alarms: tuple[Alarm, ...]
    metrics: Mapping[str, float | None]
    unread: tuple[str, ...] = ()
    asynchronous: bool = False

    @property
    def asleep(self) -> bool:
        """Return whether this is an asynchronous endpoint without an instance, so that requests wait in its queue."""
        return self.asynchronous and not any(variant.instances for variant in self.variants)

    @property
    def serving(self) -> bool:
        """Return whether the endpoint accepts requests: it has an instance or a copy, or it queues requests."""
        if self.status not in ("InService", "Updating", "SystemUpdating", "RollingBack"):
            return False
        if self.components:
            return any(item.status == "InService" and item.copies > 0 for item in self.components if item.base is None)
        return self.asleep or any(variant.instances > 0 for variant in self.variants)


def look(aws: Aws, name: str) -> EndpointStatus:
    """Read the status of an endpoint.

    Raises:
        NotThere: the endpoint does not exist.
    """
    endpoint = endpoint_of(aws, name)
    components = tuple(_components(aws, name))
    unread: list[str] = []
    targets = [f"endpoint/{name}/variant/{item['VariantName']}" for item in endpoint.get("ProductionVariants", [])]
    targets += [f"inference-component/{component.name}" for component in components if component.base is None]
    return EndpointStatus(
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
    """Return AWS's description of an endpoint.

    Raises:
        NotThere: the endpoint does not exist.
    """
    endpoint = unless_missing(lambda: aws.client("sagemaker").describe_endpoint(EndpointName=name))
    if endpoint is None:
        raise NotThere(f"there is no endpoint {name!r} in {aws.region}", "Check the name and --region.")
    return dict(endpoint)


def scaling_of(aws: Aws, targets: list[str]) -> Iterator[ScalingStatus]:
    """Yield the automatic scaling of scalable targets, without their activities.

    Args:
        targets: the ResourceIds of the targets. A target without automatic scaling is skipped.
    """
    find = partial(pages, aws, "application-autoscaling", ServiceNamespace="sagemaker")
    for target in find("describe_scalable_targets", "ScalableTargets", ResourceIds=targets) if targets else ():
        key = target["ResourceId"]
        policies = list(find("describe_scaling_policies", "ScalingPolicies", ResourceId=key))
        names = tuple(policy["PolicyName"] for policy in policies)
        wakes = any(policy["PolicyType"] != "TargetTrackingScaling" for policy in policies)
        yield ScalingStatus(key, target["MinCapacity"], target["MaxCapacity"], names, wakes)


def _with_activities(aws: Aws, targets: list[str]) -> Iterator[ScalingStatus]:
    for item in scaling_of(aws, targets):
        acts = aws.client("application-autoscaling").describe_scaling_activities(
            ServiceNamespace="sagemaker", ResourceId=item.target, MaxResults=_ACTIVITIES
        )["ScalingActivities"]
        lines = [f"{act['StartTime']:%H:%M} {act['StatusCode']}: {act['Description']}" for act in acts]
        yield replace(item, activities=tuple(lines))


def _variants(aws: Aws, endpoint: Mapping[str, Any]) -> Iterator[Variant]:
    types: dict[str, str | None] = {}
    if config := endpoint.get("EndpointConfigName"):
        read = partial(aws.client("sagemaker").describe_endpoint_config, EndpointConfigName=config)
        types = {item["VariantName"]: _types(item) for item in variants_of(unless_missing(read) or {})}
    for item in variants_of(endpoint):
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


def _types(variant: Mapping[str, Any]) -> str | None:
    pools = sorted(variant.get("InstancePools", ()), key=lambda pool: int(pool["Priority"]))
    return " or ".join(pool["InstanceType"] for pool in pools) or variant.get("InstanceType")


def _in_pools(variant: Mapping[str, Any]) -> str:
    """Describe a variant's pools by the number of instances of each type. Return "" if it has no pools."""
    pools = variant.get("InstancePools", ())
    return ", ".join(f"{pool['CurrentInstanceCount']} x {pool['InstanceType']}" for pool in pools)


def _components(aws: Aws, name: str) -> Iterator[ComponentStatus]:
    for component in components_of(aws, name):
        read = partial(aws.client("sagemaker").describe_inference_component, InferenceComponentName=component)
        if (description := unless_missing(read)) is None:  # deleted since it was listed
            continue
        runtime, specification = description.get("RuntimeConfig", {}), description.get("Specification", {})
        image = specification.get("Container", {}).get("DeployedImage", {}).get("SpecifiedImage", "")
        yield ComponentStatus(
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
"""Maps each metric to its CloudWatch name, its statistic, and the factor that converts its CloudWatch unit to ours."""


def _metrics(aws: Aws, endpoint: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the metrics of the endpoint's first variant. A deployment's endpoint has only one variant."""
    variants = endpoint.get("ProductionVariants", [])
    if not variants:
        return {}
    dimensions = [
        {"Name": "EndpointName", "Value": endpoint["EndpointName"]},
        {"Name": "VariantName", "Value": variants[0]["VariantName"]},
    ]
    # CloudWatch aligns periods to whole minutes.
    end = datetime.now(timezone.utc).replace(second=0, microsecond=0) + timedelta(minutes=1)
    queries = [
        {
            "Id": metric_name,
            "MetricStat": {
                "Metric": {"Namespace": _NAMESPACE, "MetricName": metric, "Dimensions": dimensions},
                "Period": MINUTES * 60,
                "Stat": statistic,
            },
        }
        for metric_name, (metric, statistic, _) in _METRICS.items()
    ]
    response = aws.client("cloudwatch").get_metric_data(
        MetricDataQueries=queries, StartTime=end - timedelta(minutes=MINUTES), EndTime=end
    )
    values = {item["Id"]: item["Values"] for item in response["MetricDataResults"] if item["Values"]}
    # The minutes may span two of CloudWatch's periods; then the higher percentile is used.
    return {
        metric_name: (sum if statistic == "Sum" else max)(values[metric_name]) * by if metric_name in values else None
        for metric_name, (_, statistic, by) in _METRICS.items()
    }


def _read_if_allowed(read: Any, part: str, unread: list[str]) -> Any:
    """Return the result of `read`. If AWS rejects the call, return () and add a note to `unread`."""
    try:
        return read()
    except ClientError as error:
        unread.append(f"{part}: {error_code(error)}")
        return ()
