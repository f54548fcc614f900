"""The sections of a specification. `lmi deploy schema` and docs/specification.md show their descriptions.

Limits are from botocore 1.44's service model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from deploy.spec.passthrough import PassedFields
from deploy.spec.values import (
    Architecture,
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


def check_exclusive(section: Section, *names: str) -> None:
    """Check that exactly one of the fields is set.

    Raises:
        ValueError: no field or several fields are set.
    """
    used = [name for name in names if getattr(section, name) is not None]
    if len(used) != 1:
        raise ValueError(f"set exactly one of {', '.join(names)}" + (f", not {' and '.join(used)}" if used else ""))


class Image(Section):
    """The container image: exactly one of `uri`, `repository`, `aws`."""

    uri: ImageUri | None = Field(None, description="URI of an image in ECR, with a tag or digest.")
    repository: Repository | None = Field(None, description="Repository in this account's ECR.")
    aws: Literal["djl-lmi", "djl-tensorrtllm"] | None = Field(None, description="AWS's LMI image.")
    tag: ImageTag | None = Field(None, description="Tag; default: this package's version, or for `aws` the newest.")
    cuda: str | None = Field(
        None, pattern=r"^[0-9]+\.[0-9]+$", description="CUDA version of the image; default: read from the tag."
    )
    architecture: Architecture | None = Field(
        None, description="Processors that the image is built for; default: arm64 if the name says so, else amd64."
    )

    @model_validator(mode="after")
    def _exclusive(self) -> Image:
        check_exclusive(self, "uri", "repository", "aws")
        if self.uri is not None and self.tag is not None:
            raise ValueError("tag cannot be combined with uri, which contains the tag")
        return self


class Shape(Section):
    """The dimensions of a model, which determine how much memory it needs."""

    parameters: float = Field(
        gt=0, description="Number of weights, e.g. 8.03e9; for a mixture of experts, the weights of all experts."
    )
    layers: int = Field(ge=1, le=4096, description="num_hidden_layers.")
    kv_heads: int = Field(gt=0, description="num_key_value_heads, or else num_attention_heads.")
    head_dim: int = Field(gt=0, description="head_dim, or else hidden_size / num_attention_heads.")
    heads: int | None = Field(None, gt=0, description="num_attention_heads, a multiple of the tensor parallel degree.")
    splits: list[Annotated[int, Field(gt=0)]] = Field(
        [],
        max_length=16,
        description="Sizes that the tensor parallel degree must divide, such as intermediate_size; for FP8, in blocks.",
    )
    expert_splits: int | None = Field(
        None,
        gt=0,
        description="Like `splits`, for experts: moe_intermediate_size. Not needed with expert parallelism.",
    )
    context: int | None = Field(None, gt=0, description="max_position_embeddings, the maximum context.")
    embeddings: float | None = Field(
        None, ge=0, description="Number of weights that quantization keeps in 16 bits; default: a tenth, at most 2e9."
    )
    window_layers: int = Field(0, ge=0, description="Number of layers that cache only a sliding window of tokens.")
    window: int | None = Field(None, gt=0, description="sliding_window, the number of tokens in the window.")
    window_kv_heads: int | None = Field(None, gt=0, description="KV heads of window layers; default: `kv_heads`.")
    window_head_dim: int | None = Field(None, gt=0, description="Head size of window layers; default: `head_dim`.")
    uncached_layers: int = Field(
        0, ge=0, description="Layers without their own key-value cache (linear attention, state space, shared cache)."
    )
    state: float = Field(0, ge=0, description="Bytes per request for the states of all uncached layers.")
    extra_values: float = Field(
        0,
        ge=0,
        description="Values per token that each GPU caches in addition, such as index keys of sparse attention.",
    )
    kv_heads_by_layer: list[Annotated[int, Field(gt=0)]] = Field(
        [], max_length=4096, description="KV heads of each layer with full attention, if they differ."
    )
    dtype: Precision | None = Field(None, description="Precision of the checkpoint; default: bf16.")
    stored: float | None = Field(None, gt=0, description="Size of the checkpoint's weights in bytes.")

    @model_validator(mode="after")
    def _layers_of_each_kind(self) -> Shape:
        if self.window_layers + self.uncached_layers > self.layers:
            raise ValueError("the sum of window_layers and uncached_layers must not be greater than layers")
        if self.window_layers and self.window is None:
            raise ValueError("window_layers requires window")
        return self


class Model(Section):
    """The model: `id` (name on the hub), `s3` (a prefix or archive) or `path` (a directory to upload to `upload`)."""

    id: str | None = Field(None, min_length=1, description="Name on the Hugging Face hub.")
    s3: ModelUri | None = Field(
        None, description="S3 prefix of uncompressed files, or a .tar.gz, which SageMaker unpacks at each start."
    )
    path: str | None = Field(None, description="Local directory.")
    upload: S3Prefix | None = Field(None, description="S3 prefix to which `path` is uploaded.")
    shape: Shape | None = Field(None, description="The model's dimensions, if there is no readable config.json.")
    dtype: Literal["auto", "fp32", "bf16", "fp16", "fp8", "int8", "mxfp4", "fp4", "int4"] = Field(
        "auto",
        description="Precision of the weights, used only to choose instances; `auto` is the checkpoint's precision.",
    )
    context: int | None = Field(None, gt=0, description="Maximum context, which sets option.max_model_len.")
    token_secret: SecretArn | None = Field(None, description="ARN of the Hugging Face token in Secrets Manager.")

    @property
    def directory(self) -> Path | None:
        """Return `path` with `~` expanded, or None if it is not set."""
        return None if self.path is None else Path(self.path).expanduser()

    @model_validator(mode="after")
    def _exclusive(self) -> Model:
        check_exclusive(self, "id", "s3", "path")
        if (self.path is None) != (self.upload is None):
            raise ValueError("path and upload must be set together")
        if self.token_secret is not None and self.id is None:
            raise ValueError("token_secret requires a model on the hub (id)")
        return self


class Managed(Section):
    """Managed instance scaling, in which the number of instances follows the components' copies."""

    min: Count = Field(1, description="Minimum number of instances; must be 0 with scaling.min: 0.")
    max: int = Field(ge=1, le=1000, description="Maximum number of instances.")

    @model_validator(mode="after")
    def _order(self) -> Managed:
        if self.min > self.max:
            raise ValueError("min must not be greater than max")
        return self


class Pool(Section):
    """An instance pool, one of several instance types. AWS uses the first type that is available."""

    type: PoolType = Field(description="Instance type.")
    priority: int | None = Field(
        None, ge=1, le=5, description="Priority, where 1 is tried first; default: the position in the list."
    )
    options: dict[str, Option] = Field(default_factory=dict, description="Options that override `options`.")


class Instance(Section):
    """Settings of the endpoint's instances."""

    type: InstanceType = Field("auto", description="Instance type; `auto` chooses the cheapest type that fits.")
    pools: tuple[Pool, ...] = Field((), max_length=5, description="Up to five instance types, instead of `type`.")
    count: int = Field(1, ge=1, le=1000, description="Initial number of instances.")
    unchecked: bool = Field(False, description="Accept an unknown type, or a type that seems too small.")
    price: float | None = Field(None, gt=0, description="Your price for `type`, in US dollars per hour.")
    managed: Managed | None = Field(None, description="Managed instance scaling, which follows the components' copies.")
    ami: str = Field("auto", description="InferenceAmiVersion; `auto` chooses it by `image.cuda`.")
    volume_gb: int | None = Field(
        None, ge=1, le=512, description="Size of the EBS volume in GB, for types without NVMe."
    )
    variant: Name = Field("AllTraffic", description="Production variant; for an adopted endpoint, its existing name.")


class Timeouts(Section):
    """Timeouts of a start, in seconds. Their defaults depend on the size of the model."""

    download: Seconds | None = Field(None, description="Timeout for downloading the model data, in seconds.")
    startup: Seconds | None = Field(None, description="Timeout until /ping responds with 200, in seconds.")
    provision: int | None = Field(
        None, ge=300, le=3600, description="Timeout to find instances, in seconds; default: AWS's."
    )


class PrefixAware(Section):
    """Prefix-aware routing, which sends requests with the same beginning to the same instance."""

    prefix_length: int = Field(
        1024,
        ge=1024,
        le=65536,
        description="Length of the prefix in bytes of the body, or in characters of OpenAI's messages.",
    )
    concurrency_threshold: int = Field(
        ge=1, le=1024, description="Number of concurrent requests from which another instance or copy is used."
    )


class Adapter(Section):
    """A LoRA adapter, which is an inference component that uses a base component."""

    name: Name = Field(description="Name that requests use for the component.")
    artifact: ArtifactUri = Field(description="S3 URI of the adapter's .tar.gz archive.")


class Component(Section):
    """An inference component: copies of a model on the endpoint's instances."""

    name: Name = Field(description="Name that requests use for the component.")
    copies: Count = Field(1, description="Number of copies; AWS does not create components with 0 copies.")
    accelerators: int = Field(1, ge=1, le=64, description="Number of GPUs for each copy.")
    memory_mb: int = Field(1024, ge=128, description="Minimum memory for each copy, in MB.")
    cpus: float | None = Field(None, ge=0.25, description="Number of CPU cores for each copy.")
    cache: bool = Field(True, description="Keep the image and the weights on the instance.")
    adapters: tuple[Adapter, ...] = Field((), description="LoRA adapters.")
    model: Model | None = Field(None, description="The component's own model, instead of `model`.")
    image: Image | None = Field(None, description="The component's own image, instead of `image`.")
    options: dict[str, Option | None] = Field(
        default_factory=dict, description="Options that override `options`; null removes an option."
    )
    environment: dict[str, Variable | None] = Field(
        default_factory=dict, description="Variables that override `environment`; null removes a variable."
    )
    sagemaker: PassedFields = Field(default_factory=dict, description="Further fields of CreateInferenceComponent.")


class Scaling(Section):
    """Automatic scaling by the number of concurrent requests: of copies if there are components, else of instances."""

    min: Count = Field(
        1, description="Minimum; 0 requires async, or components, whose requests fail until a copy is ready."
    )
    max: int = Field(ge=1, le=1000, description="Maximum number of copies or instances.")
    concurrency: float = Field(
        gt=0,
        description="Target number of concurrent requests per copy or instance, or with async, of waiting requests; "
        "`lmi deploy bench` measures it.",
    )
    scale_in_cooldown: int = Field(300, ge=0, description="Seconds between two scale-ins.")
    scale_out_cooldown: int = Field(60, ge=0, description="Seconds between two scale-outs.")

    @model_validator(mode="after")
    def _order(self) -> Scaling:
        if self.min > self.max:
            raise ValueError("min must not be greater than max")
        return self


class Network(Section):
    """The network of the container: your VPC, or none at all."""

    subnets: tuple[VpcId, ...] = Field((), max_length=16, description="IDs of subnets in your VPC.")
    security_groups: tuple[VpcId, ...] = Field((), max_length=5, description="IDs of security groups in your VPC.")
    isolated: bool = Field(False, description="EnableNetworkIsolation; requires a model in S3.")

    @model_validator(mode="after")
    def _both(self) -> Network:
        if bool(self.subnets) != bool(self.security_groups):
            raise ValueError("subnets and security_groups must be set together")
        return self


class Alarms(Section):
    """CloudWatch alarms, which also trigger the rollback of an update."""

    errors_5xx: int = Field(5, ge=1, description="Threshold for Invocation5XXErrors per minute.")
    model_errors: int = Field(5, ge=1, description="Threshold for InvocationModelErrors per minute.")
    latency_p95_ms: int | None = Field(
        None, ge=1, description="Threshold for the 95th percentile of ModelLatency, in milliseconds."
    )
    notify: TopicArn | None = Field(None, description="ARN of an SNS topic that the alarms notify.")


class Update(Section):
    """Updates of an existing endpoint."""

    policy: Literal["rolling", "blue_green"] = Field(
        "rolling", description="Update in batches, or with a second fleet, which needs twice the capacity."
    )
    batch_percent: int = Field(50, ge=5, le=50, description="Size of a batch, in percent.")
    wait: int = Field(120, ge=0, le=3600, description="Seconds between batches, to watch the alarms.")
    keep: int = Field(2, ge=1, le=20, description="Number of model and configuration versions kept.")


class Async(Section):
    """Asynchronous inference, instead of real-time inference."""

    output: OutputUri = Field(description="S3 URI for responses.")
    failures: OutputUri | None = Field(None, description="S3 URI for failures.")
    concurrency: int | None = Field(
        None, ge=1, le=1000, description="Maximum number of concurrent requests per instance."
    )
    notify_success: TopicArn | None = Field(None, description="ARN of an SNS topic for successful requests.")
    notify_error: TopicArn | None = Field(None, description="ARN of an SNS topic for failed requests.")

    @property
    def topics(self) -> list[str]:
        """Return the ARNs of the topics, without duplicates."""
        return list(dict.fromkeys(topic for topic in (self.notify_success, self.notify_error) if topic is not None))


class Capture(Section):
    """Data capture, which stores requests and responses in S3. The files contain everything that clients send."""

    output: OutputUri = Field(description="S3 URI for the files, in the endpoint's region.")
    percent: int = Field(100, ge=1, le=100, description="Percentage of requests to capture.")
    content: Literal["both", "input", "output"] = Field("both", description="Capture requests, responses or both.")


class Encryption(Section):
    """Customer managed KMS keys, instead of AWS managed keys."""

    model_key: KeyId | None = Field(None, description="Key that encrypts the bucket of the model and the adapters.")
    secret_key: KeyId | None = Field(None, description="Key that encrypts model.token_secret.")
    volume_key: KeyId | None = Field(None, description="Key that encrypts the instances' EBS volumes.")
    output_key: KeyId | None = Field(None, description="Key that encrypts the output of async endpoints and batches.")
    input_key: KeyId | None = Field(None, description="Key that encrypts batch.input.")
    topic_key: KeyId | None = Field(None, description="Key that encrypts the SNS topics for asynchronous inference.")
    capture_key: KeyId | None = Field(None, description="Key that encrypts captured data.")
