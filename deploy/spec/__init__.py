"""The specification of a deployment, an immutable value that is read from a YAML or JSON file and validated.

`Spec` is the whole specification, `sections.py` defines its sections, and `reading.py` reads it.
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
from deploy.spec.disagreements import disagreements, duplicates
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

_OURS = 3  # number of tags that lmi deploy sets itself (resources/resource.py); AWS allows 50 for each resource


Routing = Annotated[
    Annotated[PrefixAware, Tag("prefix_aware")] | Annotated[Literal["least_outstanding", "random"], Tag("strategy")],
    Discriminator(lambda value: "prefix_aware" if isinstance(value, dict | PrefixAware) else "strategy"),
]


class Spec(Section):
    """The specification of a deployment on SageMaker."""

    # `image` and `model` are not required: `with_parts_of_components` sets them if each component has its own.
    model_config = ConfigDict(json_schema_extra=lambda schema: schema.update(required=["name", "role"]))

    name: Name = Field(description="Name of the endpoint, and prefix of all other names.")
    endpoint: Name | None = Field(
        None,
        description="Another deployment's endpoint for components; `instance` must describe that endpoint's instances.",
    )
    region: Region | None = Field(None, description="AWS region; default: boto3's setting.")
    role: RoleArn = Field(description="ARN of the execution role.")
    image: Image = Field(
        description="The container image, here or in each component: exactly one of `uri`, `repository`, `aws`."
    )
    model: Model = Field(description="The model, here or in each component: exactly one of `id`, `s3`, `path`.")
    options: dict[str, Option] = Field(default_factory=dict, description="The handler's options, without `option.`.")
    environment: dict[str, Variable] = Field(
        default_factory=dict, description="Additional environment variables, which must not contain secrets."
    )
    instance: Instance = Field(Instance(), description="The instances.")
    timeouts: Timeouts = Field(Timeouts(), description="Timeouts for starting.")
    routing: Routing = Field(
        "least_outstanding",
        description="Strategy that distributes requests; prefix-aware routing has the fields below.",
    )
    components: tuple[Component, ...] = Field((), description="Inference components.")
    scaling: Scaling | None = Field(None, description="Automatic scaling.")
    alarms: Alarms | None = Field(Alarms(), description="CloudWatch alarms; null disables them and update rollbacks.")
    update: Update = Field(Update(), description="Updates.")
    network: Network = Field(Network(), description="Network.")
    encryption: Encryption = Field(Encryption(), description="KMS keys.")
    asynchronous: Async | None = Field(None, alias="async", description="Asynchronous inference.")
    capture: Capture | None = Field(None, description="Data capture, which stores requests and responses in S3.")
    shadow: Shadow | None = Field(None, description="A shadow variant, which gets copies of requests.")
    reservation: ReservationArn | None = Field(
        None, description="ARN of a training plan for endpoints, from which all instances come."
    )
    sagemaker: SageMaker = Field(SageMaker(), description="Fields of SageMaker's API.")
    batch: Batch | None = Field(None, description="Batch transform, for `lmi deploy batch`.")
    tags: dict[TagKey, TagValue] = Field(
        default_factory=dict, max_length=50 - _OURS, description="Tags of all resources."
    )

    @property
    def endpoint_name(self) -> str:
        """Return the name of the endpoint, which may belong to another deployment."""
        return self.endpoint or self.name

    @property
    def deployment(self) -> str:
        """Return the deployment name that the tags of its resources contain."""
        return deployment_of(self.name, self.endpoint)

    @property
    def trusts_code(self) -> bool:
        """Return whether Python code in the model files may run (`trust_remote_code`)."""
        return str(self.options.get("trust_remote_code", "")).lower() == "true"

    @property
    def topics(self) -> list[str]:
        """Return the ARNs of all SNS topics, without duplicates."""
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
            yield "network.isolated: the container cannot reach the hub; use model.path or model.s3"
        if reserved := [key for key in self.tags if key.lower().startswith(("aws:", "lmi:"))]:
            yield f"tags: {', '.join(reserved)}: names that start with aws: or lmi: are reserved"
        if self.shadow is not None and self.shadow.model is not None:
            models.append(self.shadow.model)
        in_s3 = any(model.id is None for model in models) or any(component.adapters for component in self.components)
        if self.encryption.model_key is not None and not in_s3:
            yield "encryption.model_key requires a model or adapters in S3"
        if self.encryption.secret_key is not None and all(model.token_secret is None for model in models):
            yield "encryption.secret_key requires model.token_secret"
        if self.encryption.output_key is not None and self.asynchronous is None and self.batch is None:
            yield "encryption.output_key requires async or batch"
        if self.encryption.input_key is not None and self.batch is None:
            yield "encryption.input_key requires batch"
        if self.encryption.topic_key is not None and not (self.asynchronous and self.asynchronous.topics):
            yield "encryption.topic_key requires async.notify_success or async.notify_error"
        if self.instance.price is not None and self.instance.type == "auto":
            yield "instance.price requires instance.type to be a type other than auto"
        yield from self._pool_contradictions()
        if self.instance.managed is not None and not self.components:
            yield "instance.managed requires components"
        if self.scaling is not None and self.scaling.min == 0:
            if self.asynchronous is None and not self.components:
                yield "scaling.min: 0 requires components or async; other endpoints always need an instance"
            elif self._keeps_instances():
                yield "scaling.min: 0 requires instance.managed.min: 0; otherwise instances without copies keep running"
        if self.components and self.asynchronous is not None:
            yield "async cannot be combined with components"
        yield from component_contradictions(self)
        yield from guest_contradictions(self)
        yield from disagreements(self)

    def _keeps_instances(self) -> bool:
        """Return whether the deployment's own instances keep running when its components have no copies."""
        if not self.components or self.endpoint is not None:
            return False
        return self.instance.managed is None or self.instance.managed.min != 0

    def _pool_contradictions(self) -> Iterator[str]:
        pools = self.instance.pools
        if pools and self.instance.type != "auto":
            yield "instance.type cannot be combined with instance.pools, which list the types"
        if pools and self.instance.price is not None:
            yield "instance.price cannot be combined with instance.pools, as it is the price of one type"
        if self.components and any(pool.options for pool in pools):
            yield "instance.pools[].options cannot be combined with components, whose model is the same for all types"
        priorities = [str(pool.priority or index) for index, pool in enumerate(pools, 1)]
        for setting, values in ("type", [pool.type for pool in pools]), ("priority", priorities):
            if twice := duplicates(values):
                yield f"instance.pools[].{setting}: duplicate values: {twice}"
