"""The specification of a deployment: one YAML or JSON file, validated, immutable.

`Spec` is the whole, `sections.py` has its parts, `reading.py` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from deploy.spec.components import (
    Batch,
    Shadow,
    component_contradictions,
    deployment_of,
    guest_contradictions,
    servers,
    with_parts_of_components,
)
from deploy.spec.disagreements import disagreements
from deploy.spec.passthrough import SageMaker
from deploy.spec.sections import (
    Alarms,
    Async,
    Capture,
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
from deploy.spec.values import Name, Option, Region, ReservationArn, RoleArn, Section, TagKey, TagValue, Variable

__all__ = ["Spec"]

_OURS = 3  # of a resource's fifty tags: lmi deploy's own (resources/resource.py)


Routing = Annotated[
    Annotated[PrefixAware, Tag("prefix_aware")] | Annotated[Literal["least_outstanding", "random"], Tag("strategy")],
    Discriminator(lambda value: "prefix_aware" if isinstance(value, dict | PrefixAware) else "strategy"),
]


class Spec(Section):
    """A deployment on SageMaker."""

    # The two may be missing where each component has its own; `with_parts_of_components` then fills them in.
    model_config = ConfigDict(json_schema_extra=lambda schema: schema.update(required=["name", "role"]))

    name: Name = Field(description="Name of the endpoint, and prefix of all other names.")
    endpoint: Name | None = Field(
        None,
        description="Another deployment's endpoint for the components; `instance` describes it.",
    )
    region: Region | None = Field(None, description="AWS region; default: boto3's.")
    role: RoleArn = Field(description="ARN of the execution role.")
    image: Image = Field(
        description="The container, here or in each component: exactly one of `uri`, `repository`, `aws`."
    )
    model: Model = Field(description="The model, here or in each component: exactly one of `id`, `s3`, `path`.")
    options: dict[str, Option] = Field(
        default_factory=dict,
        description="The handler's options, without `option.`.",
    )
    environment: dict[str, Variable] = Field(
        default_factory=dict, description="Additional environment variables; no secrets."
    )
    instance: Instance = Field(Instance(), description="The instances.")
    timeouts: Timeouts = Field(Timeouts(), description="Timeouts for starting.")
    routing: Routing = Field(
        "least_outstanding",
        description="How requests are distributed; prefix-aware with the fields below.",
    )
    components: tuple[Component, ...] = Field((), description="Inference components.")
    scaling: Scaling | None = Field(None, description="Automatic scaling.")
    alarms: Alarms | None = Field(Alarms(), description="Alarms; null: none, and no rollback of updates.")
    update: Update = Field(Update(), description="Updates.")
    network: Network = Field(Network(), description="Network.")
    encryption: Encryption = Field(Encryption(), description="KMS keys.")
    asynchronous: Async | None = Field(None, alias="async", description="Asynchronous inference.")
    capture: Capture | None = Field(None, description="Requests and answers as files in S3.")
    shadow: Shadow | None = Field(None, description="A variant that gets copies of requests.")
    reservation: ReservationArn | None = Field(
        None, description="ARN of a training plan for endpoints, the only source of instances."
    )
    sagemaker: SageMaker = Field(SageMaker(), description="SageMaker's own fields.")
    batch: Batch | None = Field(None, description="For `lmi deploy batch`.")
    tags: dict[TagKey, TagValue] = Field(
        default_factory=dict, max_length=50 - _OURS, description="Tags of all resources."
    )

    @property
    def endpoint_name(self) -> str:
        """The endpoint: its own, or another deployment's."""
        return self.endpoint or self.name

    @property
    def deployment(self) -> str:
        """Return the deployment's name in tags."""
        return deployment_of(self.name, self.endpoint)

    @property
    def own_code(self) -> bool:
        """Return whether the model's own Python code may run."""
        return str(self.options.get("trust_remote_code", "")).lower() == "true"

    @property
    def topics(self) -> list[str]:
        """All SNS topics, each once."""
        alarms = [self.alarms.notify] if self.alarms is not None and self.alarms.notify is not None else []
        return list(dict.fromkeys([*alarms, *(self.asynchronous.topics if self.asynchronous is not None else [])]))

    @model_validator(mode="before")
    @classmethod
    def _parts_of_components(cls, content: Any) -> Any:
        return with_parts_of_components(content)

    @model_validator(mode="after")
    def _agreement(self) -> Spec:
        if problems := [*self._contradictions()]:
            raise ValueError("\n".join(problems))
        return self

    def _contradictions(self) -> Iterator[str]:
        models = [server.model for server in servers(self)]
        if self.network.isolated and any(model.id is not None for model in models):
            yield "network.isolated: the container cannot reach the hub; give model.path or model.s3"
        if reserved := [key for key in self.tags if key.lower().startswith(("aws:", "lmi:"))]:
            yield f"tags: {', '.join(reserved)}: names that begin with aws: or lmi: are reserved"
        if self.shadow is not None and self.shadow.model is not None:
            models.append(self.shadow.model)
        in_s3 = any(model.id is None for model in models) or any(component.adapters for component in self.components)
        if self.encryption.model_key is not None and not in_s3:
            yield "encryption.model_key is for a model or adapters in S3"
        if self.encryption.secret_key is not None and all(model.token_secret is None for model in models):
            yield "encryption.secret_key is for model.token_secret"
        if self.encryption.output_key is not None and self.asynchronous is None and self.batch is None:
            yield "encryption.output_key is for the answers of async or batch"
        if self.encryption.input_key is not None and self.batch is None:
            yield "encryption.input_key is for the input of batch"
        if self.encryption.topic_key is not None and not (self.asynchronous and self.asynchronous.topics):
            yield "encryption.topic_key is for the topics of async"
        if self.instance.price is not None and self.instance.type == "auto":
            yield "instance.price is for a type that instance.type names"
        yield from self._pool_contradictions()
        if self.instance.managed is not None and not self.components:
            yield "instance.managed is for components"
        if self.scaling is not None and self.scaling.min == 0:
            if self.asynchronous is None and not self.components:
                yield "scaling.min: 0 needs components, or async: other endpoints always keep an instance"
            elif self._keeps_instances():
                yield "scaling.min: 0 needs instance.managed.min: 0, or instances stay without copies"
        if self.components and self.asynchronous is not None:
            yield "async cannot be combined with components"
        yield from component_contradictions(self)
        yield from guest_contradictions(self)
        yield from disagreements(self)

    def _keeps_instances(self) -> bool:
        """Return whether its own instances stay if components have no copy."""
        if not self.components or self.endpoint is not None:
            return False
        return self.instance.managed is None or self.instance.managed.min != 0

    def _pool_contradictions(self) -> Iterator[str]:
        pools = self.instance.pools
        if pools and self.instance.type != "auto":
            yield "instance.type cannot be combined with instance.pools, which name the types"
        if pools and self.instance.price is not None:
            yield "instance.price is for one type, but instance.pools name several"
        if self.components and any(pool.options for pool in pools):
            yield "instance.pools[].options: a component has one model for all types"
        types = [pool.type for pool in pools]
        priorities = [str(pool.priority or place) for place, pool in enumerate(pools, 1)]
        for what, said in ("type", types), ("priority", priorities):
            if twice := {item for item in said if said.count(item) > 1}:
                yield f"instance.pools[].{what}: {', '.join(sorted(twice))} is given twice"
