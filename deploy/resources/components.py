"""CreateInferenceComponent: copies of the model on the endpoint's instances, and LoRA adapters beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deploy.errors import SpecError
from deploy.resolve.decision import Decision
from deploy.resources.endpoint_config import times
from deploy.resources.names import VARIANT
from deploy.resources.resource import Kind, Resource
from deploy.resources.updating import component_deployment
from deploy.spec import Spec
from deploy.spec.sections import Adapter, Component


def component(
    spec: Spec,
    one: Component,
    decision: Decision,
    model: Resource,
    endpoint: Resource,
    alarms: Sequence[Resource],
    tags: list[dict[str, str]],
) -> Resource:
    """One component.

    Raises:
        SpecError: it asks for more GPUs than an instance has.
    """
    specification = {
        "ModelName": model.name,
        "StartupParameters": times(decision),
        "ComputeResourceRequirements": _resources(one, decision),
        "DataCacheConfig": {"EnableCaching": one.cache},
    }
    copies = {"RuntimeConfig": {"CopyCount": one.copies}}
    deployment = component_deployment(spec, one, decision, alarms)
    return Resource(
        Kind.COMPONENT,
        one.name,
        {
            "InferenceComponentName": one.name,
            "EndpointName": spec.name,
            "VariantName": VARIANT,
            "Specification": specification,
            **copies,
            "Tags": tags,
        },
        needs=(endpoint.key, model.key, *(alarm.key for alarm in alarms)),
        update={
            "InferenceComponentName": one.name,
            "Specification": specification,
            **(copies if spec.scaling is None else {}),  # else as many as scaling has come to
            **({"DeploymentConfig": deployment} if deployment else {}),
        },
    )


def adapter(spec: Spec, one: Adapter, base: Resource, tags: list[dict[str, str]]) -> Resource:
    """An adapter uses its base's copies and resources, so it says neither.

    Raises:
        SpecError: its file is no tar.gz.
    """
    if not one.artifact.endswith(".tar.gz"):
        raise SpecError(
            f"{one.name}: artifact must end in .tar.gz, as SageMaker takes adapters (given: {one.artifact})"
        )
    specification = {"BaseInferenceComponentName": base.name, "Container": {"ArtifactUrl": one.artifact}}
    return Resource(
        Kind.COMPONENT,
        one.name,
        {"InferenceComponentName": one.name, "EndpointName": spec.name, "Specification": specification, "Tags": tags},
        needs=(base.key,),
        update={"InferenceComponentName": one.name, "Specification": specification},
    )


def _resources(one: Component, decision: Decision) -> dict[str, Any]:
    required: dict[str, Any] = {"MinMemoryRequiredInMb": one.memory_mb}
    if decision.gpus:
        if one.accelerators > decision.gpus:
            raise SpecError(
                f"{one.name}: accelerators: {one.accelerators}, and {decision.instance_type} has {decision.gpus}"
            )
        required["NumberOfAcceleratorDevicesRequired"] = float(one.accelerators)
    if one.cpus is not None:
        required["NumberOfCpuCoresRequired"] = one.cpus
    return required
