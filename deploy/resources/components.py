"""Build inference components: copies of a model on the endpoint's instances, and their LoRA adapters."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Build one component.

    Args:
        decision: the decision for the component's server.
        model: the model that the component serves.
        endpoint: None: another deployment's.

    Raises:
        SpecError: it needs more GPUs than an instance has.
    """
    specification = component_request(
        {
            "Specification": {
                "ModelName": model.name,
                "StartupParameters": times(decision),
                "ComputeResourceRequirements": _resources(item, decision),
                "DataCacheConfig": {"EnableCaching": item.cache},
            }
        },
        component_fields(spec, item),
        [pool.instance_type for pool in decision.pools],
    )
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
            **(copies if spec.scaling is None else {}),  # otherwise keep the number that scaling has reached
            **({"DeploymentConfig": deployment} if deployment else {}),
        },
    )


def adapter(spec: Spec, item: Adapter, base: Resource, tags: list[dict[str, str]]) -> Resource:
    """Build one adapter. It uses its base's copies and compute resources."""
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
                f"{item.name}: accelerators: {item.accelerators}, but {decision.instance_type} has {decision.gpus}"
            )
        required["NumberOfAcceleratorDevicesRequired"] = float(item.accelerators)
    if item.cpus is not None:
        required["NumberOfCpuCoresRequired"] = item.cpus
    return required
