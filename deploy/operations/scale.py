"""More or fewer instances, or copies of a component, by hand; or other bounds for what scales by itself."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.aws import Aws
from deploy.errors import NotThere, Refused
from deploy.operations.status import Scaling, components_of, endpoint_of, scaling_of
from deploy.resources.resource import Kind, Resource

_DIMENSIONS = {
    Kind.ENDPOINT: "sagemaker:variant:DesiredInstanceCount",
    Kind.COMPONENT: "sagemaker:inference-component:DesiredCopyCount",
}


@dataclass(frozen=True)
class Scaled:
    """What is scaled: an endpoint's variant (`kind` ENDPOINT) or a component.

    Attributes:
        name: the endpoint's, or the component's.
        variant: of an endpoint.
        count: instances or copies wanted now.
        scaling: what scales it by itself; None: nothing.
    """

    kind: Kind
    name: str
    variant: str
    count: int
    scaling: Scaling | None

    @property
    def target(self) -> str:
        if self.kind is Kind.COMPONENT:
            return f"inference-component/{self.name}"
        return f"endpoint/{self.name}/variant/{self.variant}"

    @property
    def resource(self) -> Resource:
        """For `wait_for`."""
        return Resource(self.kind, self.name, {})


def scaled(aws: Aws, endpoint: str, component: str | None = None) -> Scaled:
    """What there is to scale on an endpoint: the component that is named or the only one, else the variant.

    Raises:
        NotThere: there is no such endpoint or component.
        Refused: there are several components, and none was named.
    """
    said = endpoint_of(aws, endpoint)
    sagemaker = aws.client("sagemaker")
    found = {}
    for name in components_of(aws, endpoint):
        one = sagemaker.describe_inference_component(InferenceComponentName=name)
        if "BaseInferenceComponentName" not in one.get("Specification", {}):  # an adapter has no copies of its own
            found[name] = int(one.get("RuntimeConfig", {}).get("DesiredCopyCount", 0))
    if component is None and len(found) > 1:
        raise Refused(f"{endpoint} has several components", f"Give --component: {', '.join(sorted(found))}.")
    if component is not None and component not in found:
        raise NotThere(f"{endpoint} has no component {component!r}", f"It has: {', '.join(sorted(found)) or 'none'}.")
    if found:
        name = component or next(iter(found))
        made = Scaled(Kind.COMPONENT, name, "", found[name], None)
    else:
        variant = said["ProductionVariants"][0]
        made = Scaled(
            Kind.ENDPOINT, endpoint, variant["VariantName"], int(variant.get("DesiredInstanceCount", 0)), None
        )
    scaling = next(scaling_of(aws, [made.target]), None)
    return Scaled(made.kind, made.name, made.variant, made.count, scaling)


def set_count(aws: Aws, what: Scaled, count: int) -> str:
    """Have AWS make it `count` instances or copies; returns what else is to be known, or nothing.

    Raises:
        Refused: scaling would undo it, or it is a number that cannot be.
    """
    if count < 0 or (count == 0 and what.kind is Kind.ENDPOINT):
        raise Refused(f"{what.target}: {count} cannot be", "An endpoint without components keeps one instance.")
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
        return f"Its policy ({', '.join(bounds.policies)}) goes on from here, between {bounds.min} and {bounds.max}."
    return ""


def set_bounds(aws: Aws, what: Scaled, low: int | None, high: int | None) -> tuple[int, int]:
    """Between how many it scales by itself; what is None stays. Returns both.

    Raises:
        Refused: it does not scale by itself, or the bounds cannot be.
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
            f"{what.target}: between {low} and {high} cannot be", "0 <= --min <= --max, and --max is above 0."
        )
    if low == 0 and what.kind is Kind.ENDPOINT:
        raise Refused(f"{what.target}: only components scale to 0", "Write components: into the specification.")
    aws.client("application-autoscaling").register_scalable_target(
        ServiceNamespace="sagemaker",
        ResourceId=what.target,
        ScalableDimension=_DIMENSIONS[what.kind],
        MinCapacity=low,
        MaxCapacity=high,
    )
    return low, high
