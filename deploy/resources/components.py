"""Functions that build inference components (copies of a model on the endpoint's instances) and their LoRA adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deploy.errors import SpecError
from deploy.resolve.decision import Decision
from deploy.resources.endpoint_config import times
from deploy.resources.resource import Kind, Resource, component_request
from deploy.resources.updating import component_deployment
from deploy.spec import Spec
from deploy.spec.disagreements import component_fields
from deploy.spec.sections import Adapter, Component


def component(
    spec: Spec,
    item: Component,
    decision: Decision,
    model: Resource,
    endpoint: Resource | None,
    alarms: Sequence[Resource],
    tags: list[dict[str, str]],
) -> Resource:
    """Build one inference component.

    Args:
        decision: the decision for the component's server.
        model: the model that the component serves.
        endpoint: the endpoint, or None if it belongs to another deployment.
        alarms: alarms that trigger the rollback of an update.
        tags: tags of the deployment.

    Raises:
        SpecError: the component needs more GPUs than an instance has.
    """
    specification = _specification(spec, item, decision, model)
    copies = {"RuntimeConfig": {"CopyCount": item.copies}}
    deployment = component_deployment(spec, item, decision, alarms)
    return Resource(
        Kind.COMPONENT,
        item.name,
        {
            "InferenceComponentName": item.name,
            "EndpointName": spec.endpoint_name,
            "VariantName": spec.instance.variant,
            **specification,
            **copies,
            "Tags": tags,
        },
        needs=(*([endpoint.key] if endpoint is not None else []), model.key, *(alarm.key for alarm in alarms)),
        update={
            "InferenceComponentName": item.name,
            **specification,
            **(copies if spec.scaling is None else {}),  # with automatic scaling, keep the number of copies
            **({"DeploymentConfig": deployment} if deployment else {}),
        },
    )


def _specification(spec: Spec, item: Component, decision: Decision, model: Resource) -> Mapping[str, Any]:
    specification = {
        "ModelName": model.name,
        "StartupParameters": times(decision),
        "ComputeResourceRequirements": _resources(item, decision),
        "DataCacheConfig": {"EnableCaching": item.cache},
    }
    types = [pool.instance_type for pool in decision.pools]
    return component_request({"Specification": specification}, component_fields(spec, item), types)


def adapter(spec: Spec, item: Adapter, base: Resource, tags: list[dict[str, str]]) -> Resource:
    """Build one adapter component. It uses the copies and compute resources of its base component."""
    specification = {"BaseInferenceComponentName": base.name, "Container": {"ArtifactUrl": item.artifact}}
    return Resource(
        Kind.COMPONENT,
        item.name,
        {
            "InferenceComponentName": item.name,
            "EndpointName": spec.endpoint_name,
            "Specification": specification,
            "Tags": tags,
        },
        needs=(base.key,),
        update={"InferenceComponentName": item.name, "Specification": specification},
    )


def _resources(item: Component, decision: Decision) -> dict[str, Any]:
    required: dict[str, Any] = {"MinMemoryRequiredInMb": item.memory_mb}
    if decision.gpus:
        if item.accelerators > decision.gpus:
            raise SpecError(
                f"component {item.name}: accelerators: {item.accelerators} GPUs are requested, but "
                f"{decision.instance_type} has {decision.gpus}"
            )
        required["NumberOfAcceleratorDevicesRequired"] = float(item.accelerators)
    if item.cpus is not None:
        required["NumberOfCpuCoresRequired"] = item.cpus
    return required
