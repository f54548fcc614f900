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
        ValueError: none is, or several are.
    """
    given = [name for name in names if getattr(section, name) is not None]
    if len(given) != 1:
        raise ValueError(f"give exactly one of {', '.join(names)}" + (f", not {' and '.join(given)}" if given else ""))


class Image(Section):
    """The container: one of `uri`, `repository`, `aws`."""

    uri: ImageUri | None = Field(None, description="A whole image URI in ECR, by tag or by digest (`@sha256:...`).")
    repository: Repository | None = Field(
        None, description="A repository in this account's ECR; its tag is resolved to a digest."
    )
    aws: Literal["djl-lmi", "djl-tensorrtllm"] | None = Field(None, description="AWS's own LMI image, in this region.")
    tag: ImageTag | None = Field(
        None, description="Tag of `repository` (default: this package's version) or `aws` (default: the newest known)."
    )
    cuda: str | None = Field(
        None,
        pattern=r"^\d+\.\d+$",
        description="The image's CUDA version, which decides the host; default: read from the tag.",
    )

    @model_validator(mode="after")
    def _one(self) -> Image:
        one_of(self, "uri", "repository", "aws")
        if self.uri is not None and self.tag is not None:
            raise ValueError("tag goes with repository or aws; uri holds its own")
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
        None, ge=0, description="Weights that quantization keeps in 16 bits; default: a tenth, at most 2e9."
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
    """The model: one of `id` (a hub's name), `s3` (a prefix), `path` (a local directory, uploaded to `upload`)."""

    id: str | None = Field(
        None, min_length=1, description="Name on the Hugging Face hub; the container downloads it at its start."
    )
    s3: S3Prefix | None = Field(None, description="Prefix of uncompressed model data.")
    path: str | None = Field(None, description="A directory on this machine.")
    upload: S3Prefix | None = Field(None, description="Prefix to upload `path` to.")
    shape: Shape | None = Field(None, description="The model's shape, if no config.json can be read.")
    dtype: Literal["auto", "fp32", "bf16", "fp16", "fp8", "int8", "mxfp4", "fp4", "int4"] = Field(
        "auto",
        description="Precision of the weights in memory, to choose instances only (option.quantize changes it); "
        "auto: the checkpoint's.",
    )
    context: int | None = Field(None, gt=0, description="Tokens of prompt and answer together: option.max_model_len.")
    token_secret: SecretArn | None = Field(
        None, description="ARN of the Hugging Face token in Secrets Manager; the container reads it at its start."
    )

    @property
    def directory(self) -> Path | None:
        """`path` with `~` expanded."""
        return None if self.path is None else Path(self.path).expanduser()

    @model_validator(mode="after")
    def _one(self) -> Model:
        one_of(self, "id", "s3", "path")
        if (self.path is None) != (self.upload is None):
            raise ValueError("path and upload go together")
        if self.token_secret is not None and self.id is None:
            raise ValueError("token_secret is for a model of the hub (id)")
        return self


class Managed(Section):
    """Instances whose number follows the components' copies."""

    min: Count = Field(1, description="Minimum number of instances; 0 with scaling.min: 0.")
    max: Annotated[int, Field(ge=1, le=1000)] = Field(description="Maximum number of instances.")

    @model_validator(mode="after")
    def _order(self) -> Managed:
        if self.min > self.max:
            raise ValueError("min is above max")
        return self


class Pool(Section):
    """One instance type of several, of which AWS takes the first that it has."""

    type: PoolType = Field(description="Instance type.")
    priority: Annotated[int, Field(ge=1, le=5)] | None = Field(
        None, description="1 is tried first; default: its place in the list."
    )
    options: dict[str, Option] = Field(
        default_factory=dict,
        description="Options on this type, beside `options`. They give it a model of its own (ModelNameOverride).",
    )


class Instance(Section):
    """The instances."""

    type: InstanceType = Field("auto", description="Instance type; `auto`: the cheapest type that the model fits on.")
    pools: tuple[Pool, ...] = Field(
        (), max_length=5, description="In place of `type`: up to five types; AWS takes the next if one is unavailable."
    )
    count: Annotated[int, Field(ge=1, le=1000)] = Field(1, description="First number of instances.")
    unchecked: bool = Field(False, description="Accept `type` even if the model seems not to fit on it.")
    price: Annotated[float, Field(gt=0)] | None = Field(
        None, description="US dollars an hour that you pay for `type`, in place of its price class."
    )
    managed: Managed | None = Field(None, description="With components: the number of instances follows their copies.")
    ami: str = Field("auto", description="InferenceAmiVersion; `auto` chooses by the image's CUDA version.")
    volume_gb: Annotated[int, Field(ge=1, le=512)] | None = Field(
        None, description="GB of the EBS volume; not for types with NVMe."
    )
    variant: Name = Field(
        "AllTraffic", description="Name of the production variant; of an adopted endpoint its own, or no update rolls."
    )


class Timeouts(Section):
    """Timeouts in seconds; by default derived from the size of the model."""

    download: Seconds | None = Field(None, description="Seconds until the model data is on the instance.")
    startup: Seconds | None = Field(None, description="Seconds until /ping answers 200.")
    provision: Annotated[int, Field(ge=300, le=3600)] | None = Field(
        None, description="Seconds until AWS has found instances; default: AWS's."
    )


class PrefixAware(Section):
    """Prefix-aware routing: requests with the same beginning go to the same instance."""

    prefix_length: Annotated[int, Field(ge=1024, le=65536)] = Field(
        1024, description="Length of the beginning: bytes of the body; on the OpenAI route, characters of the messages."
    )
    concurrency_threshold: Annotated[int, Field(ge=1, le=1024)] = Field(
        description="Concurrent requests at an instance, or at a copy, from which another one is taken."
    )


class Adapter(Section):
    """A LoRA adapter: an inference component on a base component."""

    name: Name = Field(description="Name of the adapter's component, for requests.")
    artifact: ArtifactUri = Field(description="The adapter's tar.gz in S3.")


class Component(Section):
    """An inference component: copies of the model, or of one of its own, on the endpoint's instances."""

    name: Name = Field(description="Name of the component, for requests.")
    copies: Count = Field(1, description="First number of copies.")
    accelerators: Annotated[int, Field(ge=1, le=64)] = Field(1, description="GPUs of one copy.")
    memory_mb: Annotated[int, Field(ge=128)] = Field(1024, description="Minimum memory of a copy, in MB.")
    cpus: Annotated[float, Field(ge=0.25)] | None = Field(None, description="CPU cores of one copy.")
    cache: bool = Field(True, description="Keep image and weights on the instance, to add copies faster.")
    adapters: tuple[Adapter, ...] = Field((), description="LoRA adapters of this model.")
    model: Model | None = Field(None, description="A model of its own, in place of `model`.")
    image: Image | None = Field(None, description="An image of its own, in place of `image`.")
    options: dict[str, Option | None] = Field(
        default_factory=dict, description="Its options, over `options`; null leaves one out."
    )
    environment: dict[str, Variable | None] = Field(
        default_factory=dict, description="Its variables, over `environment`; null leaves one out."
    )
    sagemaker: ComponentFields = Field(
        default_factory=dict, description="As sagemaker.component, for this component only."
    )


class Scaling(Section):
    """Automatic scaling between `min` and `max` copies (with components) or instances, by concurrent requests."""

    min: Count = Field(
        1,
        description="Minimum number; 0 needs async, where requests wait in the queue, or components, where they fail "
        "until a copy is up, and clients retry.",
    )
    max: Annotated[int, Field(ge=1, le=1000)] = Field(description="Maximum number of copies or instances.")
    concurrency: Annotated[float, Field(gt=0)] = Field(
        description="Target of concurrent requests per copy: about 0.7 of the knee that `lmi deploy bench` finds; with "
        "async, of waiting requests per instance."
    )
    scale_in_cooldown: Annotated[int, Field(ge=0)] = Field(300, description="Seconds between two reductions.")
    scale_out_cooldown: Annotated[int, Field(ge=0)] = Field(60, description="Seconds between two increases.")

    @model_validator(mode="after")
    def _order(self) -> Scaling:
        if self.min > self.max:
            raise ValueError("min is above max")
        return self


class Network(Section):
    """Your VPC; `isolated`: the container has no network."""

    subnets: tuple[VpcId, ...] = Field((), max_length=16, description="Ids of subnets.")
    security_groups: tuple[VpcId, ...] = Field((), max_length=5, description="Ids of security groups.")
    isolated: bool = Field(
        False, description="EnableNetworkIsolation. The model must be in S3; hub libraries are set offline."
    )

    @model_validator(mode="after")
    def _both(self) -> Network:
        if bool(self.subnets) != bool(self.security_groups):
            raise ValueError("subnets and security_groups go together")
        return self


class Alarms(Section):
    """CloudWatch alarms, which also trigger the rollback of an update."""

    errors_5xx: Annotated[int, Field(ge=1)] = Field(5, description="Invocation5XXErrors per minute.")
    model_errors: Annotated[int, Field(ge=1)] = Field(5, description="InvocationModelErrors per minute.")
    latency_p95_ms: Annotated[int, Field(ge=1)] | None = Field(
        None, description="95th percentile of ModelLatency, in milliseconds."
    )
    notify: TopicArn | None = Field(None, description="SNS topic of the alarms.")


class Update(Section):
    """Updates of an existing endpoint."""

    policy: Literal["rolling", "blue_green"] = Field(
        "rolling", description="rolling: in batches; blue_green: a second fleet, which needs twice the capacity."
    )
    batch_percent: Annotated[int, Field(ge=5, le=50)] = Field(50, description="Size of a batch.")
    wait: Annotated[int, Field(ge=0, le=3600)] = Field(
        120, description="Seconds between two batches, in which alarms may trigger the rollback."
    )
    keep: Annotated[int, Field(ge=1, le=20)] = Field(2, description="Number of configuration versions to keep.")


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
    percent: Annotated[int, Field(ge=1, le=100)] = Field(100, description="Percentage of the requests.")
    content: Literal["both", "input", "output"] = Field(
        "both", description="What is kept of a request: its body (input), its answer (output), or both."
    )


class Encryption(Section):
    """Your own KMS keys, in place of AWS's."""

    model_key: KeyId | None = Field(None, description="KMS key of the bucket of the model and its adapters.")
    secret_key: KeyId | None = Field(None, description="KMS key of model.token_secret.")
    volume_key: KeyId | None = Field(None, description="KMS key of the instances' EBS volume.")
    output_key: KeyId | None = Field(None, description="KMS key of the answers of async and batch.")
    input_key: KeyId | None = Field(None, description="KMS key of the bucket of batch.input.")
    topic_key: KeyId | None = Field(None, description="KMS key of the SNS topics of async.")
    capture_key: KeyId | None = Field(None, description="KMS key of the files of capture.")
