"""Scale manually: set the number of instances or copies, or the bounds of automatic scaling."""

from __future__ import annotations

from dataclasses import dataclass, replace

from deploy.aws import Aws, components_of, pages
from deploy.errors import NotThere, Refused
from deploy.operations.status import ScalingStatus, endpoint_of, scaling_of
from deploy.resources.resource import DIMENSIONS, TAG_DEPLOYMENT, Kind, Resource, tag_map


@dataclass(frozen=True)
class ScalingTarget:
    """A variant of an endpoint (`kind` ENDPOINT) or an inference component that can be scaled.

    Attributes:
        name: name of the endpoint or the component.
        variant: name of the endpoint's variant, or "" for a component.
        count: desired number of instances or copies.
        scaling: settings of automatic scaling, or None if the target does not scale automatically.
        sleeps: whether the target can scale to zero, as components and asynchronous endpoints can.
    """

    kind: Kind
    name: str
    variant: str
    count: int
    scaling: ScalingStatus | None
    sleeps: bool = True

    @property
    def resource_id(self) -> str:
        if self.kind is Kind.COMPONENT:
            return f"inference-component/{self.name}"
        return f"endpoint/{self.name}/variant/{self.variant}"

    @property
    def resource(self) -> Resource:
        """Return the resource to wait for with `wait_for`."""
        return Resource(self.kind, self.name, {})


def scaling_target(aws: Aws, endpoint: str, component: str | None = None) -> ScalingTarget:
    """Return the component to scale, or the endpoint's variant if the endpoint has no components.

    Args:
        component: name of the component, or None for the endpoint's only component.

    Raises:
        NotThere: the endpoint or the component does not exist.
        Refused: the endpoint has several components, but `component` is None.
    """
    endpoint_description = endpoint_of(aws, endpoint)
    components = {}
    for name in components_of(aws, endpoint):
        item = aws.client("sagemaker").describe_inference_component(InferenceComponentName=name)
        if "BaseInferenceComponentName" not in item.get("Specification", {}):  # an adapter has no copies of its own
            components[name] = int(item.get("RuntimeConfig", {}).get("DesiredCopyCount", 0))
    if component is None and len(components) > 1:
        raise Refused(f"{endpoint} has several components", f"Choose a --component: {', '.join(sorted(components))}.")
    if component is not None and component not in components:
        raise NotThere(
            f"{endpoint} has no component {component!r}", f"Its components: {', '.join(sorted(components)) or 'none'}."
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
    return replace(target, scaling=next(scaling_of(aws, [target.resource_id]), None))


def refuse_foreign(aws: Aws, target: ScalingTarget) -> None:
    """Refuse to scale an endpoint or a component that lmi deploy does not own.

    Raises:
        Refused: the resource has no tag of a deployment.
    """
    if target.kind is Kind.ENDPOINT:
        arn = endpoint_of(aws, target.name)["EndpointArn"]
    else:
        component = aws.client("sagemaker").describe_inference_component(InferenceComponentName=target.name)
        arn = component["InferenceComponentArn"]
    if TAG_DEPLOYMENT not in tag_map(pages(aws, "sagemaker", "list_tags", "Tags", ResourceArn=arn)):
        raise Refused(
            f"{target.kind.value} {target.name} was not created by lmi deploy",
            "Scale it with the tool that created it, or take it over first (`lmi deploy adopt`, `up --adopt`).",
        )


def set_count(aws: Aws, target: ScalingTarget, count: int) -> str:
    """Set the number of instances or copies. Return a note for the user, or an empty string.

    Raises:
        Refused: the number is invalid, or automatic scaling would change it again.
    """
    if count < 0 or (count == 0 and target.kind is Kind.ENDPOINT):
        advice = "An endpoint without components needs at least one instance."
        if target.kind is Kind.COMPONENT:
            advice = "Use 0 or a positive number of copies."
        elif target.sleeps:
            advice = "Use a positive number. An asynchronous endpoint scales to zero by itself (scaling.min: 0)."
        raise Refused(f"{target.resource_id} cannot be scaled to {count} instances or copies", advice)
    bounds = target.scaling
    if bounds is not None and not bounds.min <= count <= bounds.max:
        raise Refused(
            f"{target.resource_id} scales automatically between {bounds.min} and {bounds.max}, "
            f"which would undo {count}",
            "Change the bounds with --min and --max, or change `scaling` and run `lmi deploy update`.",
        )
    sagemaker = aws.client("sagemaker")
    if target.kind is Kind.COMPONENT:
        sagemaker.update_inference_component_runtime_config(
            InferenceComponentName=target.name, DesiredRuntimeConfig={"CopyCount": count}
        )
    else:
        sagemaker.update_endpoint_weights_and_capacities(
            EndpointName=target.name,
            DesiredWeightsAndCapacities=[{"VariantName": target.variant, "DesiredInstanceCount": count}],
        )
    if bounds is not None and bounds.policies and bounds.min != bounds.max:
        names = ", ".join(bounds.policies)
        return f"Automatic scaling ({names}) continues from this number, between {bounds.min} and {bounds.max}."
    return ""


def set_bounds(aws: Aws, target: ScalingTarget, low: int | None, high: int | None) -> tuple[int, int]:
    """Set the bounds of automatic scaling, and return both.

    Args:
        low: minimum number of instances or copies, or None to keep the current minimum.
        high: maximum number of instances or copies, or None to keep the current maximum.

    Raises:
        Refused: automatic scaling is off, or the bounds are invalid.
    """
    if target.scaling is None:
        raise Refused(
            f"{target.resource_id} does not scale automatically",
            "Add `scaling` to the specification, and run `lmi deploy update`.",
        )
    low = target.scaling.min if low is None else low
    high = target.scaling.max if high is None else high
    if not 0 <= low <= high or high == 0:
        raise Refused(
            f"{target.resource_id}: the bounds {low} to {high} are invalid", "Use 0 <= --min <= --max, and 1 <= --max."
        )
    if low == 0 and not target.sleeps:
        raise Refused(
            f"{target.resource_id}: only components and asynchronous endpoints can scale to 0",
            "Set --min to 1 or more, or use `components` or `async` in the specification.",
        )
    if low == 0 and not target.scaling.wakes:
        raise Refused(
            f"{target.resource_id} could not scale up again from 0: a policy of the type StepScaling is missing",
            "Set scaling.min: 0 in the specification and run `lmi deploy update`, which creates the policy.",
        )
    aws.client("application-autoscaling").register_scalable_target(
        ServiceNamespace="sagemaker",
        ResourceId=target.resource_id,
        ScalableDimension=DIMENSIONS[target.kind],
        MinCapacity=low,
        MaxCapacity=high,
    )
    return low, high
