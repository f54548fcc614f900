"""The servers of a specification, batch transform, the shadow variant, and components on another deployment's endpoint.

A server is a model with its image, options and environment, and corresponds to one model in SageMaker. Components with
the same values and the same number of GPUs share a server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import Field, model_validator

from deploy.spec.passthrough import SageMaker
from deploy.spec.sections import Component, Image, Instance, Model
from deploy.spec.values import InstanceType, Option, OutputUri, Section, Variable

if TYPE_CHECKING:
    from deploy.spec import Spec

Value = TypeVar("Value")

_REQUIRED = ("model", "image")
"""Sections that each component needs, either its own or those at the top level."""


def servers(spec: Spec) -> list[Spec]:
    """Return a specification for each server.

    Without components, the only result is the whole specification. Otherwise, each result contains the components that
    share the server, and their own settings replace those at the top level.
    """
    if not spec.components:
        return [spec]
    groups: dict[str, list[Component]] = {}
    whole: dict[str, Spec] = {}
    for item in spec.components:
        server_spec = _server(spec, item)
        parts = server_spec.model_dump_json(include={"model", "image", "options", "environment"})
        key = f"{item.accelerators} {parts}"
        whole.setdefault(key, server_spec)
        groups.setdefault(key, []).append(item)
    return [server.model_copy(update={"components": tuple(groups[key])}) for key, server in whole.items()]


def uploads(spec: Spec) -> list[str]:
    """Return the S3 prefixes to which models are uploaded, without duplicates."""
    flags = [server.model.upload for server in servers(spec)]
    return list(dict.fromkeys(prefix for prefix in flags if prefix is not None))


def title(server: Spec) -> str:
    """Return the names of a server's components, e.g. `component chat` or `components chat, batch`."""
    names = [item.name for item in server.components]
    return f"component{'s' * (len(names) > 1)} {', '.join(names)}"


def with_parts_of_components(content: Any) -> Any:
    """Return a specification with `model` and `image` at the top level, even if only its components have them.

    What is added is copied from the first component. No component inherits it: a component without a `model` or `image`
    gets an empty section, so that the error about the missing section names that component.
    """
    items = content.get("components") if isinstance(content, Mapping) else None
    if not isinstance(items, list | tuple) or not all(isinstance(item, Mapping) for item in items):
        return content
    for part in _REQUIRED:
        values = [item[part] for item in items if item.get(part) is not None]
        if content.get(part) is None and values:
            items = [item if item.get(part) is not None else {**item, part: {}} for item in items]
            content = {**content, part: values[0], "components": items}
    return content


def component_contradictions(spec: Spec) -> Iterator[str]:
    """Yield a line for each contradiction between components."""
    names = [component.name for component in spec.components]
    names += [adapter.name for component in spec.components for adapter in component.adapters]
    if twice := {name for name in names if names.count(name) > 1}:
        yield f"components: duplicate names: {', '.join(sorted(twice))}"
    places: dict[str, str] = {}
    for model in [server.model for server in servers(spec)]:
        if model.path is None or model.upload is None or places.setdefault(model.upload, model.path) == model.path:
            continue
        yield (
            f"components[].model.upload: {places[model.upload]} and {model.path} would both be uploaded to "
            f"{model.upload}; use different prefixes"
        )


def _server(spec: Spec, item: Component) -> Spec:
    return spec.model_copy(
        update={
            "model": item.model or spec.model,
            "image": item.image or spec.image,
            "options": _laid_over(spec.options, item.options),
            "environment": _laid_over(spec.environment, item.environment),
        }
    )


def _laid_over(whole: Mapping[str, Value], overrides: Mapping[str, Value | None]) -> dict[str, Value]:
    return {name: value for name, value in {**whole, **overrides}.items() if value is not None}


# -- the section of batch transform ------------------------------------------------------------------------------------


MOST_TOGETHER = 100
"""Maximum of the concurrency, of the payload size in MB, and of their product (CreateTransformJob)."""


class Batch(Section):
    """Batch transform (`lmi deploy batch`), in which each line of files in S3 is a request. It needs no endpoint."""

    input: OutputUri = Field(description="S3 URI of JSON Lines files: an object or a prefix.")
    output: OutputUri = Field(description="S3 URI for the output. The output for OBJECT is stored as OBJECT.out.")
    concurrency: int | None = Field(
        None,
        ge=1,
        le=MOST_TOGETHER,
        description="Concurrent requests per instance; default: option.max_rolling_batch_size.",
    )
    payload_mb: int | None = Field(
        None,
        ge=1,
        le=MOST_TOGETHER,
        description="Maximum MB of a line; its product with concurrency must be at most 100. Default: 6 or less.",
    )
    timeout: int = Field(3600, ge=1, le=3600, description="Timeout for each line, in seconds.")
    retries: int = Field(3, ge=0, le=3, description="Additional attempts after a failure.")

    @model_validator(mode="after")
    def _together(self) -> Batch:
        together = (self.concurrency or 1) * (self.payload_mb or 1)
        if together > MOST_TOGETHER:
            raise ValueError(f"concurrency times payload_mb is {together}, but must be at most {MOST_TOGETHER}")
        return self


# -- the shadow variant, which gets copies of requests, and whose responses are discarded ------------------------------


class Shadow(Section):
    """A shadow variant with another image, model or options. It gets copies of requests."""

    percent: int = Field(ge=1, le=100, description="Percentage of requests to copy.")
    image: Image | None = Field(None, description="Image of the shadow variant; default: `image`.")
    model: Model | None = Field(None, description="Model of the shadow variant, with `id` or `s3`; default: `model`.")
    options: dict[str, Option] = Field(default_factory=dict, description="Options that override `options`.")
    environment: dict[str, Variable] = Field(default_factory=dict, description="Variables that override `environment`.")
    type: InstanceType | None = Field(None, description="Instance type of the shadow variant; default: instance.type.")
    count: int = Field(1, ge=1, le=1000, description="Number of instances of the shadow variant.")

    @model_validator(mode="after")
    def _other(self) -> Shadow:
        if self.model is not None and self.model.path is not None:
            raise ValueError("model.path is not supported for the shadow variant; use model.s3 or model.id")
        if self.image is None and self.model is None and not (self.options or self.environment or self.type):
            raise ValueError("is the same as the serving variant; set image, model, options, environment or type")
        return self


def shadow_of(spec: Spec) -> Spec:
    """Return a specification for the shadow variant. It is used only to build the shadow's model and variant."""
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


# -- a guest: a deployment on another deployment's endpoint, which has its own name in tags and fewer settings ---------


_AT = "@"
"""Separator in the names of guests. SageMaker's names cannot contain it, so no other deployment has such a name."""


def deployment_of(name: str, endpoint: str | None = None) -> str:
    """Return a deployment's name in tags: NAME, or NAME@ENDPOINT for a guest.

    Args:
        endpoint: name of another deployment's endpoint, or None if the deployment has its own endpoint.
    """
    return name if endpoint is None else f"{name}{_AT}{endpoint}"


def name_and_endpoint(deployment: str) -> tuple[str, str]:
    """Return the name of a deployment, and the name of its endpoint, from its name in tags."""
    name, _, endpoint = deployment.partition(_AT)
    return name, endpoint or name


def is_guest(deployment: str) -> bool:
    """Return whether a deployment uses another deployment's endpoint, according to its name in tags."""
    return _AT in deployment


_OF_ENDPOINT = (
    "routing",
    "capture",
    "reservation",
    "network",
    "async",
    "encryption.volume_key",
    "timeouts.provision",
    "instance.pools",
    "instance.managed",
    "instance.ami",
    "instance.volume_gb",
    "sagemaker.endpoint_config",
    "sagemaker.variant",
    "sagemaker.endpoint",
)
"""Settings that belong to the endpoint, so a guest cannot change them."""


def guest_contradictions(spec: Spec) -> Iterator[str]:
    """Yield settings that cannot be combined with `endpoint`."""
    if spec.endpoint is None:
        return
    if spec.endpoint == spec.name:
        yield f"endpoint: {spec.endpoint} is this deployment's own name; use another name, or omit endpoint"
    if not spec.components:
        yield "endpoint: requires components, which are added to the other deployment's endpoint"
    if spec.instance.type == "auto":
        yield "endpoint: requires instance.type to be the type of that endpoint's instances, not auto"
    if spec.batch is not None:
        yield "batch: cannot be combined with endpoint; use a separate file, as a job needs no endpoint"
    changed = spec.model_dump(by_alias=True, exclude_defaults=True)
    for path in _OF_ENDPOINT:
        section, _, name = path.partition(".")
        if section in changed and (not name or name in changed[section]):
            yield f"{path} belongs to the endpoint {spec.endpoint}; set it in the file of that endpoint's deployment"
