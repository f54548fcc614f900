"""SageMaker's API as the installed botocore describes it."""

from __future__ import annotations

from functools import cache
from typing import Any

from botocore.loaders import Loader
from botocore.model import ServiceModel


@cache
def sagemaker() -> ServiceModel:
    """Return the description of SageMaker's operations and shapes."""
    return ServiceModel(Loader().load_service_model("sagemaker", "service-2"), service_name="sagemaker")


def instance_types(shape: str) -> tuple[str, ...]:
    """Return the instance types of an enumeration, e.g. `TransformInstanceType`."""
    found: Any = sagemaker().shape_for(shape)
    return tuple(found.enum)
