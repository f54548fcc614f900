"""Scale by hand: set the number of instances or copies, or the bounds of automatic scaling."""

from __future__ import annotations

from dataclasses import dataclass, replace

from deploy.aws import Aws, components_of
from deploy.errors import NotThere, Refused
from deploy.operations.status import Scaling, endpoint_of, scaling_of
from deploy.resources.resource import DIMENSIONS, Kind, Resource


@dataclass(frozen=True)
class ScalingTarget:
    """An endpoint's variant (`kind` ENDPOINT) or a component.

    Attributes:
        name: name of the endpoint or the component.
        variant: the endpoint's variant; empty for a component.
        count: desired number of instances or copies.
        scaling: its automatic scaling; None: it has none.
        sleeps: whether it may have no instance or copy: a component, or an asynchronous endpoint.
    """

    kind: Kind
    name: str
    variant: str
    count: int
    scaling: Scaling | None
    sleeps: bool = True

    @property
    def target(self) -> str:
        if self.kind is Kind.COMPONENT:
            return f"inference-component/{self.name}"
        return f"endpoint/{self.name}/variant/{self.variant}"

    @property
    def resource(self) -> Resource:
        """Return the resource for `wait_for`."""
        return Resource(self.kind, self.name, {})


def scaling_target(aws: Aws, endpoint: str, component: str | None = None) -> ScalingTarget:
    """Find what to scale: the named or only component, otherwise the endpoint's variant.

    Raises:
        NotThere: there is no such endpoint or component.
        Refused: there are several components, and none is named.
    """
    endpoint_description = endpoint_of(aws, endpoint)
    sagemaker = aws.client("sagemaker")
    components = {}
    for name in components_of(aws, endpoint):
        item = sagemaker.describe_inference_component(InferenceComponentName=name)
        if "BaseInferenceComponentName" not in item.get("Specification", {}):  # an adapter has no copies of its own
            components[name] = int(item.get("RuntimeConfig", {}).get("DesiredCopyCount", 0))
    if component is None and len(components) > 1:
        raise Refused(f"{endpoint} has several components", f"Give --component: {', '.join(sorted(components))}.")
    if component is not None and component not in components:
        raise NotThere(
            f"{endpoint} has no component {component!r}", f"It has: {', '.join(sorted(components)) or 'none'}."
        )
    if components:
        name = component or next(iter(components))
        target = ScalingTarget(Kind.COMPONENT, name, "", components[name], None)
    else:
        variant = endpoint_description["ProductionVariants"][0]
        target = ScalingTarget(
            Kind.ENDPOINT,
            endpoint,
            variant["VariantName"],
            int(variant.get("DesiredInstanceCount", 0)),
            None,
            sleeps="AsyncInferenceConfig" in endpoint_description,
        )
    return replace(target, scaling=next(scaling_of(aws, [target.target]), None))


def set_count(aws: Aws, what: ScalingTarget, count: int) -> str:
    """Set the number of instances or copies; return a note for the user, or nothing.

    Raises:
        Refused: automatic scaling would undo it, or the number is invalid.
    """
    if count < 0 or (count == 0 and what.kind is Kind.ENDPOINT):
        advice = "An endpoint without components keeps one instance."
        if what.sleeps:
            advice = "An asynchronous endpoint scales to zero by itself (scaling.min: 0) when no request waits."
        raise Refused(f"{what.target}: {count} cannot be", advice)
    bounds = what.scaling
    if bounds is not None and not bounds.min <= count <= bounds.max:
        raise Refused(
            f"{what.target} scales between {bounds.min} and {bounds.max}, which would undo {count}",
            "Move the bounds with --min and --max, or change scaling: and run `lmi deploy update`.",
        )
    sagemaker = aws.client("sagemaker")
    if what.kind is Kind.COMPONENT:
        sagemaker.update_inference_component_runtime_config(
            InferenceComponentName=what.name, DesiredRuntimeConfig={"CopyCount": count}
        )
    else:
        sagemaker.update_endpoint_weights_and_capacities(
            EndpointName=what.name,
            DesiredWeightsAndCapacities=[{"VariantName": what.variant, "DesiredInstanceCount": count}],
        )
    if bounds is not None and bounds.policies and bounds.min != bounds.max:
        return f"Its policy ({', '.join(bounds.policies)}) continues from here, between {bounds.min} and {bounds.max}."
    return ""


def set_bounds(aws: Aws, what: ScalingTarget, low: int | None, high: int | None) -> tuple[int, int]:
    """Set the bounds of automatic scaling; None leaves one unchanged. Return both.

    Raises:
        Refused: there is no automatic scaling, or the bounds are invalid.
    """
    if what.scaling is None:
        raise Refused(
            f"{what.target} does not scale by itself",
            "Write scaling: into the specification and run `lmi deploy update`.",
        )
    low = what.scaling.min if low is None else low
    high = what.scaling.max if high is None else high
    if not 0 <= low <= high or high == 0:
        raise Refused(
            f"{what.target}: between {low} and {high} is not possible", "0 <= --min <= --max, and --max is above 0."
        )
    if low == 0 and not what.sleeps:
        raise Refused(
            f"{what.target}: only components and asynchronous endpoints scale to 0",
            "Write components: or async: into the specification.",
        )
    if low == 0 and f"{what.name}/wake" not in what.scaling.policies and what.kind is Kind.ENDPOINT:
        raise Refused(
            f"{what.target}: it could not scale up again: it has no policy {what.name}/wake",
            "Write scaling.min: 0 into the specification and run `lmi deploy update`, which creates one.",
        )
    aws.client("application-autoscaling").register_scalable_target(
        ServiceNamespace="sagemaker",
        ResourceId=what.target,
        ScalableDimension=DIMENSIONS[what.kind],
        MinCapacity=low,
        MaxCapacity=high,
    )
    return low, high
