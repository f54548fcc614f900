"""The sections of a specification. `lmi deploy schema` and docs/specification.md show their descriptions.

Limits are those of botocore 1.44's service model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from deploy.spec.passthrough import ComponentFields
from deploy.spec.values import (
    ArtifactUri,
    Count,
    ImageTag,
    ImageUri,
    InstanceType,
    KeyId,
    ModelUri,
    Name,
    Option,
    OutputUri,
    PoolType,
    Precision,
    Repository,
    S3Prefix,
    Seconds,
    SecretArn,
    Section,
    TopicArn,
    Variable,
    VpcId,
)


def one_of(section: Section, *names: str) -> None:
    """Check that exactly one of the fields is set.

    Raises:
        ValueError: none or several are set.
    """
    given = [name for name in names if getattr(section, name) is not None]
    if len(given) != 1:
        raise ValueError(f"give exactly one of {', '.join(names)}" + (f", not {' and '.join(given)}" if given else ""))


class Image(Section):
    """The container: one of `uri`, `repository`, `aws`."""

    uri: ImageUri | None = Field(None, description="Image URI in ECR, by tag or digest.")
    repository: Repository | None = Field(None, description="Repository in this account's ECR.")
    aws: Literal["djl-lmi", "djl-tensorrtllm"] | None = Field(None, description="AWS's LMI image.")
    tag: ImageTag | None = Field(None, description="Tag; default: this package's version, for `aws` the newest known.")
    cuda: str | None = Field(
        None,
        pattern=r"^\d+\.\d+$",
        description="The image's CUDA version; default: read from the tag.",
    )

    @model_validator(mode="after")
    def _one(self) -> Image:
        one_of(self, "uri", "repository", "aws")
        if self.uri is not None and self.tag is not None:
            raise ValueError("tag is for repository or aws; uri contains its own")
        return self


class Shape(Section):
    """The numbers of a model that decide its memory; read from its config.json if possible."""

    parameters: float = Field(
        gt=0, description="Number of weights, e.g. 8.03e9; of a mixture of experts those of all experts."
    )
    layers: int = Field(ge=1, le=4096, description="num_hidden_layers.")
    kv_heads: int = Field(gt=0, description="num_key_value_heads, else num_attention_heads.")
    head_dim: int = Field(gt=0, description="head_dim, else hidden_size / num_attention_heads.")
    heads: int | None = Field(None, gt=0, description="num_attention_heads, which tensor parallel degrees must divide.")
    context: int | None = Field(None, gt=0, description="max_position_embeddings: the longest context.")
    embeddings: float | None = Field(
        None, ge=0, description="Number of weights that quantization keeps in 16 bits; default: a tenth, at most 2e9."
    )
    window_layers: int = Field(0, ge=0, description="Number of the layers that keep K and V of a sliding window only.")
    window: int | None = Field(None, gt=0, description="sliding_window: tokens of the window.")
    window_kv_heads: int | None = Field(None, gt=0, description="KV heads of these layers; default: `kv_heads`.")
    window_head_dim: int | None = Field(None, gt=0, description="Head size of these layers; default: `head_dim`.")
    uncached_layers: int = Field(
        0, ge=0, description="Number of the layers without K and V: linear attention, state space, or shared K and V."
    )
    state: float = Field(0, ge=0, description="Bytes of the states that one request has in all of these.")
    dtype: Precision | None = Field(None, description="The checkpoint's precision; default: bf16.")
    stored: float | None = Field(None, gt=0, description="Bytes of the checkpoint's weights.")

    @model_validator(mode="after")
    def _layers_of_each_kind(self) -> Shape:
        if self.window_layers + self.uncached_layers > self.layers:
            raise ValueError("window_layers and uncached_layers are more than layers")
        if self.window_layers and self.window is None:
            raise ValueError("window_layers needs window")
        return self


class Model(Section):
    """The model: `id` (a hub's name), `s3` (a prefix or archive), `path` (a local directory, uploaded to `upload`)."""

    id: str | None = Field(None, min_length=1, description="Name on the Hugging Face hub.")
    s3: ModelUri | None = Field(
        None, description="S3 prefix of uncompressed files; or a .tar.gz, which SageMaker unpacks at each start."
    )
    path: str | None = Field(None, description="Local directory.")
    upload: S3Prefix | None = Field(None, description="S3 prefix to upload `path` to.")
    shape: Shape | None = Field(None, description="The model's shape, if there is no readable config.json.")
    dtype: Literal["auto", "fp32", "bf16", "fp16", "fp8", "int8", "mxfp4", "fp4", "int4"] = Field(
        "auto",
        description="Precision of the weights, only to choose instances; auto: the checkpoint's.",
    )
    context: int | None = Field(None, gt=0, description="Sets option.max_model_len.")
    token_secret: SecretArn | None = Field(None, description="ARN of the Hugging Face token in Secrets Manager.")

    @property
    def directory(self) -> Path | None:
        """`path` with `~` expanded."""
        return None if self.path is None else Path(self.path).expanduser()

    @model_validator(mode="after")
    def _one(self) -> Model:
        one_of(self, "id", "s3", "path")
        if (self.path is None) != (self.upload is None):
            raise ValueError("path and upload must be given together")
        if self.token_secret is not None and self.id is None:
            raise ValueError("token_secret is for a model of the hub (id)")
        return self


class Managed(Section):
    """Instances whose number follows the components' copies."""

    min: Count = Field(1, description="Minimum; 0 with scaling.min: 0.")
    max: Annotated[int, Field(ge=1, le=1000)] = Field(description="Maximum.")

    @model_validator(mode="after")
    def _order(self) -> Managed:
        if self.min > self.max:
            raise ValueError("min is above max")
        return self


class Pool(Section):
    """One instance type of several, of which AWS takes the first that it has."""

    type: PoolType = Field(description="Instance type.")
    priority: Annotated[int, Field(ge=1, le=5)] | None = Field(
        None, description="1 is first; default: the place in the list."
    )
    options: dict[str, Option] = Field(
        default_factory=dict,
        description="Options that override `options`.",
    )


class Instance(Section):
    """The instances."""

    type: InstanceType = Field("auto", description="Instance type; `auto`: the cheapest that fits.")
    pools: tuple[Pool, ...] = Field((), max_length=5, description="Up to five types, instead of `type`.")
    count: Annotated[int, Field(ge=1, le=1000)] = Field(1, description="Initial number of instances.")
    unchecked: bool = Field(False, description="Accept a type that seems too small.")
    price: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Your price for `type`, in US dollars per hour."
    )
    managed: Managed | None = Field(None, description="The number of instances follows the components' copies.")
    ami: str = Field("auto", description="InferenceAmiVersion; `auto`: by `image.cuda`.")
    volume_gb: Annotated[int, Field(ge=1, le=512)] | None = Field(
        None, description="GB of the EBS volume, for types without NVMe."
    )
    variant: Name = Field("AllTraffic", description="Production variant; keep an adopted endpoint's own name.")


class Timeouts(Section):
    """Timeouts in seconds; by default derived from the size of the model."""

    download: Seconds | None = Field(None, description="Seconds to download the model data.")
    startup: Seconds | None = Field(None, description="Seconds until /ping answers 200.")
    provision: Annotated[int, Field(ge=300, le=3600)] | None = Field(
        None, description="Seconds to find instances; default: AWS's."
    )


class PrefixAware(Section):
    """Prefix-aware routing: requests with the same beginning go to the same instance."""

    prefix_length: Annotated[int, Field(ge=1024, le=65536)] = Field(
        1024, description="Length of the prefix: bytes of the body, or characters of OpenAI's messages."
    )
    concurrency_threshold: Annotated[int, Field(ge=1, le=1024)] = Field(
        description="Number of concurrent requests at which another instance or copy is used."
    )


class Adapter(Section):
    """A LoRA adapter: an inference component on a base component."""

    name: Name = Field(description="Name, for requests.")
    artifact: ArtifactUri = Field(description="Its tar.gz in S3.")


class Component(Section):
    """An inference component: copies of the model, or of one of its own, on the endpoint's instances."""

    name: Name = Field(description="Name, for requests.")
    copies: Count = Field(1, description="Number of copies; AWS creates no component with 0.")
    accelerators: Annotated[int, Field(ge=1, le=64)] = Field(1, description="GPUs of one copy.")
    memory_mb: Annotated[int, Field(ge=128)] = Field(1024, description="Minimum memory of a copy, in MB.")
    cpus: Annotated[float, Field(ge=0.25)] | None = Field(None, description="CPU cores of one copy.")
    cache: bool = Field(True, description="Keep image and weights on the instance.")
    adapters: tuple[Adapter, ...] = Field((), description="LoRA adapters.")
    model: Model | None = Field(None, description="Its own model, instead of `model`.")
    image: Image | None = Field(None, description="Its own image, instead of `image`.")
    options: dict[str, Option | None] = Field(
        default_factory=dict, description="Options that override `options`; null removes one."
    )
    environment: dict[str, Variable | None] = Field(
        default_factory=dict, description="Variables that override `environment`; null removes one."
    )
    sagemaker: ComponentFields = Field(default_factory=dict, description="Like sagemaker.component, for this one.")


class Scaling(Section):
    """Automatic scaling between `min` and `max` copies (with components) or instances, by concurrent requests."""

    min: Count = Field(
        1,
        description="Minimum; 0 needs async, or components, whose requests fail until a copy is up.",
    )
    max: Annotated[int, Field(ge=1, le=1000)] = Field(description="Maximum of copies or instances.")
    concurrency: Annotated[float, Field(gt=0)] = Field(
        description="Target number of concurrent requests per copy, or with async, of waiting ones per instance; "
        "`lmi deploy bench` finds it."
    )
    scale_in_cooldown: Annotated[int, Field(ge=0)] = Field(300, description="Seconds between two scale-ins.")
    scale_out_cooldown: Annotated[int, Field(ge=0)] = Field(60, description="Seconds between two scale-outs.")

    @model_validator(mode="after")
    def _order(self) -> Scaling:
        if self.min > self.max:
            raise ValueError("min is above max")
        return self


class Network(Section):
    """Your VPC; `isolated`: the container has no network."""

    subnets: tuple[VpcId, ...] = Field((), max_length=16, description="Ids of subnets.")
    security_groups: tuple[VpcId, ...] = Field((), max_length=5, description="Ids of security groups.")
    isolated: bool = Field(False, description="EnableNetworkIsolation, with a model in S3.")

    @model_validator(mode="after")
    def _both(self) -> Network:
        if bool(self.subnets) != bool(self.security_groups):
            raise ValueError("subnets and security_groups must be given together")
        return self


class Alarms(Section):
    """CloudWatch alarms, which also trigger the rollback of an update."""

    errors_5xx: Annotated[int, Field(ge=1)] = Field(5, description="Invocation5XXErrors per minute.")
    model_errors: Annotated[int, Field(ge=1)] = Field(5, description="InvocationModelErrors per minute.")
    latency_p95_ms: Annotated[int, Field(ge=1)] | None = Field(
        None, description="p95 of ModelLatency, in milliseconds."
    )
    notify: TopicArn | None = Field(None, description="SNS topic of the alarms.")


class Update(Section):
    """Updates of an existing endpoint."""

    policy: Literal["rolling", "blue_green"] = Field(
        "rolling", description="In batches, or with a second fleet, which needs twice the capacity."
    )
    batch_percent: Annotated[int, Field(ge=5, le=50)] = Field(50, description="Size of a batch.")
    wait: Annotated[int, Field(ge=0, le=3600)] = Field(120, description="Seconds between batches, for alarms.")
    keep: Annotated[int, Field(ge=1, le=20)] = Field(2, description="Versions to keep.")


class Async(Section):
    """Asynchronous inference, in place of real-time inference."""

    output: OutputUri = Field(description="S3 URI of the answers.")
    failures: OutputUri | None = Field(None, description="S3 URI of the failures.")
    concurrency: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        None, description="Concurrent requests per instance."
    )
    notify_success: TopicArn | None = Field(None, description="SNS topic of answers.")
    notify_error: TopicArn | None = Field(None, description="SNS topic of failures.")

    @property
    def topics(self) -> list[str]:
        """The topics, each once."""
        return list(dict.fromkeys(topic for topic in (self.notify_success, self.notify_error) if topic is not None))


class Capture(Section):
    """Requests and answers as files in S3, for evaluation. They hold whatever clients send."""

    output: OutputUri = Field(description="S3 URI of the files, in the endpoint's region.")
    percent: Annotated[int, Field(ge=1, le=100)] = Field(100, description="Percentage of requests.")
    content: Literal["both", "input", "output"] = Field(
        "both", description="What is captured: requests, answers or both."
    )


class Encryption(Section):
    """Your own KMS keys, in place of AWS's."""

    model_key: KeyId | None = Field(None, description="Key of the model's and adapters' bucket.")
    secret_key: KeyId | None = Field(None, description="Key of model.token_secret.")
    volume_key: KeyId | None = Field(None, description="Key of the instances' volume.")
    output_key: KeyId | None = Field(None, description="Key for the answers of async and batch.")
    input_key: KeyId | None = Field(None, description="Key of batch.input's bucket.")
    topic_key: KeyId | None = Field(None, description="Key of async's SNS topics.")
    capture_key: KeyId | None = Field(None, description="Key of capture's files.")
