"""A shadow of what serves: it gets copies of the requests, and nobody sees its answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from deploy.spec.passthrough import SageMaker
from deploy.spec.sections import Image, Instance, Model
from deploy.spec.values import InstanceType, Option, Section, Variable

if TYPE_CHECKING:
    from deploy.spec import Spec


class Shadow(Section):
    """Another image, model or options beside what serves: copies of requests go to it, its answers are discarded."""

    percent: Annotated[int, Field(ge=1, le=100)] = Field(description="Percentage of requests copied.")
    image: Image | None = Field(None, description="Its image; default: `image`.")
    model: Model | None = Field(None, description="Its model, by `id` or `s3`; default: `model`.")
    options: dict[str, Option] = Field(default_factory=dict, description="Options that override `options`.")
    environment: dict[str, Variable] = Field(default_factory=dict, description="Variables that override `environment`.")
    type: InstanceType | None = Field(None, description="Its instance type; default: instance.type.")
    count: Annotated[int, Field(ge=1, le=1000)] = Field(1, description="Its number of instances.")

    @model_validator(mode="after")
    def _other(self) -> Shadow:
        if self.model is not None and self.model.path is not None:
            raise ValueError("model.path is for the serving model: put this one's files into S3, and give model.s3")
        if self.image is None and self.model is None and not (self.options or self.environment or self.type):
            raise ValueError("is what serves: give its image, model, options, environment or type")
        return self


def shadow_of(spec: Spec) -> Spec:
    """Return the shadow as a specification of its own, of which only model and variant are built."""
    shadow = spec.shadow
    assert shadow is not None
    instance = Instance(
        type=shadow.type or spec.instance.type,
        count=shadow.count,
        unchecked=spec.instance.unchecked,
        ami="auto" if shadow.image is not None else spec.instance.ami,
        volume_gb=None if shadow.type is not None else spec.instance.volume_gb,
    )
    return spec.model_copy(
        update={
            "image": shadow.image or spec.image,
            "model": shadow.model or spec.model,
            "options": {**spec.options, **shadow.options},
            "environment": {**spec.environment, **shadow.environment},
            "instance": instance,
            "scaling": None,
            "reservation": None,
            "capture": None,
            "shadow": None,
            "sagemaker": SageMaker(model=spec.sagemaker.model),
        }
    )
