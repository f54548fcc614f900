"""The specification of a deployment: one YAML or JSON file, validated, and never changed afterwards.

`Spec` is the whole; `sections.py` its parts; `reading.py` makes one of a file and the command line.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from deploy.spec.sections import (
    Alarms,
    Async,
    Component,
    Encryption,
    Image,
    Instance,
    Model,
    Network,
    PrefixAware,
    Scaling,
    Timeouts,
    Update,
)
from deploy.spec.values import Name, Region, RoleArn, Section

__all__ = ["Spec"]


class Spec(Section):
    """What is to be on SageMaker."""

    name: Name = Field(description="Of the endpoint, and the beginning of all other names.")
    region: Region | None = Field(None, description="Default: what boto3 is set to.")
    role: RoleArn = Field(description="Who the container is (`lmi deploy iam` prints what it must be allowed).")
    image: Image
    model: Model
    options: dict[str, str | int | float | bool] = Field(
        default_factory=dict,
        description="The handler's options (docs/options.md), without `option.`; OPTION_* in there.",
    )
    environment: dict[str, str] = Field(default_factory=dict, description="Further variables. Nothing secret.")
    instance: Instance = Instance()
    timeouts: Timeouts = Timeouts()
    routing: PrefixAware | Literal["least_outstanding", "random"] = "least_outstanding"
    components: tuple[Component, ...] = Field((), description="None: the endpoint holds the model itself.")
    scaling: Scaling | None = None
    alarms: Alarms | None = Alarms()
    update: Update = Update()
    network: Network = Network()
    encryption: Encryption = Encryption()
    asynchronous: Async | None = Field(None, alias="async")
    tags: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _agreement(self) -> Spec:
        if self.network.isolated and self.model.id is not None:
            raise ValueError("network.isolated: the container cannot reach the hub; give model.path or model.s3")
        if self.instance.managed is not None and not self.components:
            raise ValueError("instance.managed is for components")
        if self.scaling is not None and self.scaling.min == 0:
            if not self.components:
                raise ValueError("scaling.min: 0 needs components")
            if self.instance.managed is None or self.instance.managed.min != 0:
                raise ValueError("scaling.min: 0 needs instance.managed.min: 0, or instances stay without copies")
        if self.components and self.asynchronous is not None:
            raise ValueError("async does not go with components")
        names = [component.name for component in self.components]
        names += [adapter.name for component in self.components for adapter in component.adapters]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"components: {', '.join(sorted(twice))} stands there twice")
        return self
