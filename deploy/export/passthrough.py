"""Fields of `sagemaker:` that a format has no place for: refused where the loss does harm, noted elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deploy.errors import Refused
from deploy.resources.resource import Kind, Resource
from deploy.spec import Spec

LACKING: Mapping[Kind, Mapping[str, bool]] = {
    Kind.MODEL: {
        "PrimaryContainer.AdditionalModelDataSources": True,
        "PrimaryContainer.ContainerMetricsConfig": False,
        "PrimaryContainer.ModelDataSource.S3DataSource.ETag": True,
        "PrimaryContainer.ModelDataSource.S3DataSource.ManifestEtag": True,
        "PrimaryContainer.ModelDataSource.S3DataSource.ManifestS3Uri": True,
    },
    Kind.ENDPOINT_CONFIG: {
        "CrossRegionTrafficConfig": True,
        "ProductionVariants.AcceleratorPartitionLayouts": True,
        "ProductionVariants.AcceleratorType": False,
        "ShadowProductionVariants.AcceleratorPartitionLayouts": True,
        "ShadowProductionVariants.AcceleratorType": False,
    },
    Kind.COMPONENT: {
        "Specification.ComputeResourceRequirements.AcceleratorPartitionType": True,
        "Specifications.ComputeResourceRequirements.AcceleratorPartitionType": True,
    },
}
"""Fields that CloudFormation's resource types lack, and whether their loss does harm."""

_IN_PODS: Mapping[str, str] = {
    "sagemaker.endpoint_config.ShadowProductionVariants": "it is a variant of an endpoint",
    "sagemaker.endpoint_config.CrossRegionTrafficConfig": "inference routers know endpoints only",
    "sagemaker.variant.AcceleratorPartitionLayouts": "partition the nodes' GPUs, and ask for nvidia.com/mig-…",
    "sagemaker.variant.CapacityReservationConfig": "reservations are the node group's",
    "sagemaker.component.Specification.ComputeResourceRequirements": "it is a request of SageMaker's scheduler",
    "sagemaker.component.Specifications": "a pod has one specification for all types",
    "components.sagemaker.Specification.ComputeResourceRequirements": "it is a request of SageMaker's scheduler",
    "components.sagemaker.Specifications": "a pod has one specification for all types",
    "sagemaker.model.PrimaryContainer.AdditionalModelDataSources": "a pod has the model's own files only",
    "sagemaker.model.PrimaryContainer.ModelDataSource": "a pod has the model's own files only",
    "sagemaker.model.PrimaryContainer.ImageConfig": "the nodes pull the image",
}
"""Fields without a place in Kubernetes whose loss does harm; all others are noted."""


def without_lacking(resource: Resource, content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a resource's properties without those that CloudFormation lacks, and the places of these.

    Raises:
        Refused: there is one whose loss does harm.
    """
    lacking = LACKING.get(resource.kind, {})
    lost: list[str] = []
    kept = _without(content, "", lacking, lost)
    if harm := [place for place in lost if lacking[place]]:
        raise Refused(
            f"CloudFormation has no place for {', '.join(harm)} of {resource.key}",
            "Leave it out, or make the endpoint with `lmi deploy up`.",
        )
    return kept, lost


def pod_notes(spec: Spec) -> list[str]:
    """Return a sentence for each field that Kubernetes has no place for.

    Raises:
        Refused: there is one whose loss does harm.
    """
    places = list(dict.fromkeys(_places(spec)))
    harm = {field: why for field, why in _IN_PODS.items() if any(_within(place, field) for place in places)}
    if harm:
        told = "; ".join(f"{field}: {why}" for field, why in harm.items())
        raise Refused(f"this format has no place for {told}", "Leave it out, or deploy to SageMaker.")
    return [f"{place}: no equivalent here; it is a field of SageMaker's API." for place in places]


def _within(place: str, field: str) -> bool:
    return place == field or place.startswith(f"{field}.")


def _places(spec: Spec) -> Iterator[str]:
    """Yield the fields of `sagemaker`, two levels deep where there are mappings."""
    for part in type(spec.sagemaker).model_fields:
        yield from _below(f"sagemaker.{part}", getattr(spec.sagemaker, part))
    for item in spec.components:
        yield from _below("components.sagemaker", item.sagemaker)


def _below(place: str, fields: Mapping[str, Any]) -> Iterator[str]:
    for name, value in fields.items():
        if isinstance(value, Mapping) and name in ("Specification", "PrimaryContainer", "DeploymentConfig"):
            yield from _below(f"{place}.{name}", value)
        else:
            yield f"{place}.{name}"


def _without(value: Any, path: str, lacking: Mapping[str, bool], lost: list[str]) -> Any:
    if isinstance(value, Mapping):
        kept = {}
        for name, item in value.items():
            place = f"{path}.{name}".removeprefix(".")
            if place in lacking:
                lost.append(place)
            else:
                kept[name] = _without(item, place, lacking, lost)
        return kept
    return [_without(item, path, lacking, lost) for item in value] if isinstance(value, list) else value
