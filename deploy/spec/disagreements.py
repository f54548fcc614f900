"""Contradictions between sections of a specification, mainly between `sagemaker` and other sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deploy.spec.components import servers

if TYPE_CHECKING:
    from deploy.spec import Spec
    from deploy.spec.components import Shadow
    from deploy.spec.sections import Component, Model

_CONFIG, _VARIANT = "sagemaker.endpoint_config", "sagemaker.variant"
_LAYOUTS = f"{_VARIANT}.AcceleratorPartitionLayouts"


def disagreements(spec: Spec) -> Iterator[str]:
    """Yield a line for each contradiction. Each line starts with the field name."""
    config = spec.sagemaker.endpoint_config
    if spec.sagemaker.component and not spec.components:
        yield "sagemaker.component: requires components"
    if "AsyncInferenceConfig" in config and spec.asynchronous is None:
        yield f"{_CONFIG}.AsyncInferenceConfig: requires async"
    if "CrossRegionTrafficConfig" in config and spec.asynchronous is not None:
        yield f"{_CONFIG}.CrossRegionTrafficConfig: cannot be combined with async"
    if "ManagedInstanceScaling" in spec.sagemaker.variant and spec.instance.managed is None:
        yield f"{_VARIANT}.ManagedInstanceScaling: requires instance.managed"
    yield from _shadows(spec)
    yield from _partitions(spec)
    if "ModelDataSource" in spec.sagemaker.model.get("PrimaryContainer", {}) and any(
        model.id is not None for model in _models(spec)
    ):
        yield "sagemaker.model.PrimaryContainer.ModelDataSource: requires a model in S3 (model.s3 or model.path)"
    rolling = spec.sagemaker.endpoint.get("DeploymentConfig", {}).get("RollingUpdatePolicy")
    managed = spec.instance.managed
    single = max(spec.instance.count, managed.min if managed is not None else 0) == 1
    if rolling is not None and (spec.update.policy != "rolling" or single):
        yield (
            "sagemaker.endpoint.DeploymentConfig.RollingUpdatePolicy: requires update.policy: rolling, and an "
            "instance.count of 2 or more"
        )
    for item in spec.components:
        yield from _specifications(spec, item)
    yield from _beside(spec)


def _models(spec: Spec) -> Iterator[Model]:
    yield from (server.model for server in servers(spec))
    if spec.shadow is not None and spec.shadow.model is not None:
        yield spec.shadow.model


def duplicates(values: Sequence[object]) -> str:
    """Return the values that occur more than once, sorted and separated by commas, or an empty string."""
    return ", ".join(sorted({str(value) for value in values if values.count(value) > 1}))


def _beside(spec: Spec) -> Iterator[str]:
    """Yield settings that cannot be combined with `capture`, `shadow` or `reservation`."""
    for name, part, field in (
        ("capture", "endpoint_config", "DataCaptureConfig"),
        ("shadow", "endpoint_config", "ShadowProductionVariants"),
        ("reservation", "variant", "CapacityReservationConfig"),
    ):
        if getattr(spec, name) is not None and field in getattr(spec.sagemaker, part):
            yield f"sagemaker.{part}.{field}: cannot be combined with {name}, which sets it"
    names = [item.name for item in spec.components if item.model or item.image or item.options or item.environment]
    if spec.batch is not None and names:
        settings = f"components have their own settings ({', '.join(names)})"
        yield f"batch: {settings}; a job has one model, so use another file"
    if spec.encryption.capture_key is not None and spec.capture is None:
        yield "encryption.capture_key requires capture"
    if spec.capture is not None and spec.asynchronous is not None:
        yield "capture cannot be combined with async, whose responses are stored in S3 anyway"
    if spec.reservation is not None:
        region = spec.reservation.split(":")[3]
        if spec.region not in (None, region):
            yield f"reservation: is in {region}, but the endpoint is in {spec.region}"
        if spec.instance.pools:
            yield "reservation: is for a single instance type; use instance.type instead of instance.pools"
        if spec.instance.type == "auto":
            yield "reservation: is for a single instance type; set instance.type to that type"
    if spec.shadow is not None:
        yield from _beside_shadow(spec, spec.shadow)


def _beside_shadow(spec: Spec, shadow: Shadow) -> Iterator[str]:
    if spec.instance.variant == "Shadow":
        yield "instance.variant: Shadow is reserved for the shadow variant"
    for name, other in (("components", spec.components), ("async", spec.asynchronous)):
        if other:
            yield f"shadow cannot be combined with {name}"
    if spec.instance.pools and shadow.type is None:
        yield "shadow.type: is required with instance.pools"
    if spec.network.isolated and shadow.model is not None and shadow.model.id is not None:
        yield "network.isolated: the container cannot reach the hub; use shadow.model.s3"


def component_fields(spec: Spec, item: Component) -> list[Mapping[str, Any]]:
    """Return the user's fields for a component's request, in the order in which they are merged into it."""
    return [spec.sagemaker.component, item.sagemaker]


def _shadows(spec: Spec) -> Iterator[str]:
    path = f"{_CONFIG}.ShadowProductionVariants"
    shadows = spec.sagemaker.endpoint_config.get("ShadowProductionVariants", ())
    if len(shadows) > 1:
        yield f"{path}: SageMaker accepts only one shadow variant, not {len(shadows)}"
    if shadows and spec.asynchronous is not None:
        yield f"{path}: cannot be combined with async"
    if shadows and spec.components:
        yield f"{path}: cannot be combined with components"


def _partitions(spec: Spec) -> Iterator[str]:
    """Yield contradictions in the partitions of accelerators.

    SageMaker places one component on each partition, if the instances have partitions of the type that it requests.
    """
    layouts = spec.sagemaker.variant.get("AcceleratorPartitionLayouts", ())
    there = [kind for layout in layouts for kind in layout.get("AcceleratorPartitionTypes", ())]
    if len(layouts) > 1:
        yield f"{_LAYOUTS}: SageMaker accepts only one layout for all accelerators, not {len(layouts)}"
    if layouts and not spec.components:
        yield f"{_LAYOUTS}: requires components, one for each partition"
    for item in spec.components:
        kinds = [*_partition_types(spec, item)]
        field = f"components {item.name}: AcceleratorPartitionType"
        if not layouts and kinds and spec.endpoint is None:  # on another endpoint, its deployment sets them
            yield f"{field}: requires {_LAYOUTS}"
        elif layouts and not kinds:
            yield f"{field}: is required, as the instances are partitioned ({', '.join(there)})"
        elif layouts and (other := [kind for kind in kinds if kind not in there]):
            yield f"{field}: {other[0]} is not in {_LAYOUTS} ({', '.join(there)})"
        if kinds and item.accelerators != 1:
            yield f"{field}: requires accelerators: 1 (one partition), but accelerators is {item.accelerators}"


def _partition_types(spec: Spec, item: Component) -> Iterator[str]:
    for fields in component_fields(spec, item):
        for specification in (fields.get("Specification", {}), *fields.get("Specifications", ())):
            kind = specification.get("ComputeResourceRequirements", {}).get("AcceleratorPartitionType")
            if kind is not None:
                yield kind


def _specifications(spec: Spec, item: Component) -> Iterator[str]:
    """Yield contradictions between a component's specifications by instance type and the deployment's types."""
    path = f"components {item.name}: Specifications"
    pools = [pool.type for pool in spec.instance.pools]
    types = [
        item.get("InstanceType") for fields in component_fields(spec, item) for item in fields.get("Specifications", ())
    ]
    if types and not pools:
        yield f"{path}: requires instance.pools, which list the types"
        return
    if twice := duplicates(types):
        yield f"{path}: duplicate types: {twice}"
    for kind in types:
        if kind is None:
            yield f"{path}: InstanceType is required"
        elif kind not in pools:
            yield f"{path}: {kind} is not in instance.pools ({', '.join(pools)})"
