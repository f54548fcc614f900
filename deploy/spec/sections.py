"""The sections of a specification. `lmi deploy schema` and docs/deploy.md show their descriptions.

Limits are those of botocore 1.44's service model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from deploy.spec.values import (
    ArtifactUri,
    Count,
    ImageTag,
    ImageUri,
    InstanceType,
    KeyId,
    Name,
    OutputUri,
    Precision,
    Repository,
    S3Prefix,
    Seconds,
    SecretArn,
    Section,
    TopicArn,
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
        None, description="A repository of this account's ECR; the tag becomes a digest."
    )
    aws: Literal["djl-lmi", "djl-tensorrtllm"] | None = Field(None, description="AWS's own LMI image, in this region.")
    tag: ImageTag | None = Field(
        None, description="Of `repository` (default: this package's version) or `aws` (default: the newest known)."
    )
    cuda: str | None = Field(
        None, pattern=r"^\d+\.\d+$", description="The image's CUDA, which chooses the host; else read from the tag."
    )

    @model_validator(mode="after")
    def _one(self) -> Image:
        one_of(self, "uri", "repository", "aws")
        if self.uri is not None and self.tag is not None:
            raise ValueError("tag goes with repository or aws; uri holds its own")
        return self


class Shape(Section):
    """What of a model decides its memory; read from its config.json where that can be had."""

    parameters: float = Field(gt=0, description="Number of weights, e.g. 8.03e9; of a mixture all experts'.")
    layers: int = Field(gt=0, description="num_hidden_layers.")
    kv_heads: int = Field(gt=0, description="num_key_value_heads; num_attention_heads where there are none.")
    head_dim: int = Field(gt=0, description="head_dim; hidden_size / num_attention_heads where there is none.")
    heads: int | None = Field(None, gt=0, description="num_attention_heads: which tensor parallel degrees divide it.")
    context: int | None = Field(None, gt=0, description="max_position_embeddings: its longest context.")
    embeddings: float | None = Field(
        None, ge=0, description="Weights that quantization leaves in 16 bits; default a tenth, at most 2e9."
    )
    dtype: Precision | None = Field(None, description="The checkpoint's precision; default bf16.")
    stored: float | None = Field(None, gt=0, description="Bytes of the checkpoint's weights, where they are known.")


class Model(Section):
    """What is served: one of `id` (a hub's name), `s3` (a prefix), `path` (a directory here, uploaded to `upload`)."""

    id: str | None = Field(
        None, min_length=1, description="On the Hugging Face hub; the container fetches it at its start."
    )
    s3: S3Prefix | None = Field(None, description="Uncompressed model data, as it lies there.")
    path: str | None = Field(None, description="A directory on this machine.")
    upload: S3Prefix | None = Field(None, description="Where `path` is uploaded to before anything else.")
    shape: Shape | None = Field(None, description="For the advice on instances, where no config.json can be read.")
    dtype: Literal["auto", "fp32", "bf16", "fp16", "fp8", "int8", "fp4", "int4"] = Field(
        "auto",
        description="Of the weights in memory, for the advice only (option.quantize changes them); "
        "auto: the checkpoint's.",
    )
    context: int | None = Field(None, gt=0, description="Tokens of prompt and answer: option.max_model_len.")
    token_secret: SecretArn | None = Field(
        None, description="Secrets Manager's ARN of the Hugging Face token; the container reads it at its start."
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
    """Instances that come and go with the components' copies."""

    min: Count = Field(1, description="Instances at least; 0 with scaling.min: 0.")
    max: Annotated[int, Field(ge=1, le=1000)] = Field(description="Instances at most.")

    @model_validator(mode="after")
    def _order(self) -> Managed:
        if self.min > self.max:
            raise ValueError("min is above max")
        return self


class Instance(Section):
    """Where it runs."""

    type: InstanceType = Field("auto", description="`auto` takes the cheapest type that the model fits on.")
    count: Annotated[int, Field(ge=1, le=1000)] = Field(1, description="Instances at the beginning.")
    unchecked: bool = Field(False, description="Take `type` though the model seems not to fit on it.")
    price: Annotated[float, Field(gt=0)] | None = Field(
        None, description="US dollars an hour that you pay for `type`, shown instead of its dated cost class."
    )
    managed: Managed | None = Field(None, description="With components: instances follow their copies.")
    ami: str = Field("auto", description="InferenceAmiVersion; `auto` chooses by the image's CUDA.")
    volume_gb: Annotated[int, Field(ge=1, le=512)] | None = Field(None, description="Not on types with NVMe.")


class Timeouts(Section):
    """Seconds; what is not given is derived from the size of the model."""

    download: Seconds | None = Field(None, description="Until the model data is on the instance.")
    startup: Seconds | None = Field(None, description="Until /ping answers 200.")
    provision: Annotated[int, Field(ge=300, le=3600)] | None = Field(
        None, description="Until instances are found; default: AWS's."
    )


class PrefixAware(Section):
    """Requests with the same beginning go to the same instance."""

    prefix_length: Annotated[int, Field(ge=1024, le=65536)] = Field(1024, description="Bytes of the beginning.")
    concurrency_threshold: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="Requests under way at an instance above which another one is taken."
    )


class Adapter(Section):
    """A LoRA adapter: a component of its own beside its base."""

    name: Name = Field(description="Of its component: what requests name.")
    artifact: ArtifactUri = Field(description="The adapter's tar.gz.")


class Component(Section):
    """An inference component: copies of the model on the endpoint's instances."""

    name: Name = Field(description="What requests name.")
    copies: Count = Field(1, description="At the beginning.")
    accelerators: Annotated[int, Field(ge=1, le=64)] = Field(1, description="GPUs of one copy.")
    memory_mb: Annotated[int, Field(ge=128)] = Field(1024, description="Memory that a copy needs at least.")
    cpus: Annotated[float, Field(ge=0.25)] | None = Field(None, description="CPU cores of one copy.")
    cache: bool = Field(True, description="Keep image and weights on the instance, for a faster scale-out.")
    adapters: tuple[Adapter, ...] = Field((), description="LoRA adapters of this model.")


class Scaling(Section):
    """Between `min` and `max` copies (with components) or instances, by requests under way at once."""

    min: Count = Field(1, description="0 needs components; requests then fail until a copy is up, so clients retry.")
    max: Annotated[int, Field(ge=1, le=1000)] = Field(description="Copies, or instances, at most.")
    concurrency: Annotated[float, Field(gt=0)] = Field(
        description="Aimed at: requests under way per copy; about 0.7 of the knee that `lmi deploy bench` shows."
    )
    scale_in_cooldown: Annotated[int, Field(ge=0)] = Field(300, description="Seconds between two steps down.")
    scale_out_cooldown: Annotated[int, Field(ge=0)] = Field(60, description="Seconds between two steps up.")

    @model_validator(mode="after")
    def _order(self) -> Scaling:
        if self.min > self.max:
            raise ValueError("min is above max")
        return self


class Network(Section):
    """A VPC of yours; `isolated` cuts the container off from everything."""

    subnets: tuple[VpcId, ...] = Field((), max_length=16, description="Ids.")
    security_groups: tuple[VpcId, ...] = Field((), max_length=5, description="Ids.")
    isolated: bool = Field(False, description="EnableNetworkIsolation; the model must be in S3. Hubs are set offline.")

    @model_validator(mode="after")
    def _both(self) -> Network:
        if bool(self.subnets) != bool(self.security_groups):
            raise ValueError("subnets and security_groups go together")
        return self


class Alarms(Section):
    """CloudWatch alarms; they also roll an update back."""

    errors_5xx: Annotated[int, Field(ge=1)] = Field(5, description="Invocation5XXErrors in a minute.")
    model_errors: Annotated[int, Field(ge=1)] = Field(5, description="InvocationModelErrors in a minute.")
    latency_p95_ms: Annotated[int, Field(ge=1)] | None = Field(None, description="ModelLatency's 95th percentile.")
    notify: TopicArn | None = Field(None, description="SNS topic that alarms go to.")


class Update(Section):
    """How an endpoint that serves is changed."""

    policy: Literal["rolling", "blue_green"] = Field("rolling", description="blue_green needs the capacity twice.")
    batch_percent: Annotated[int, Field(ge=5, le=50)] = Field(50, description="Instances that change at a time.")
    wait: Annotated[int, Field(ge=0, le=3600)] = Field(120, description="Seconds between two batches, alarms watched.")
    keep: Annotated[int, Field(ge=1, le=20)] = Field(2, description="Versions of the configuration that are kept.")


class Async(Section):
    """Asynchronous inference instead of the waiting kind."""

    output: OutputUri = Field(description="Where answers are put.")
    failures: OutputUri | None = Field(None, description="Where the answers of failed requests are put.")
    concurrency: Annotated[int, Field(ge=1, le=1000)] | None = Field(None, description="Requests at once, an instance.")
    notify_success: TopicArn | None = Field(None, description="SNS topic.")
    notify_error: TopicArn | None = Field(None, description="SNS topic.")


class Encryption(Section):
    """Keys of your own instead of AWS's."""

    volume_key: KeyId | None = Field(None, description="KMS key of the instances' EBS volume.")
    output_key: KeyId | None = Field(None, description="KMS key of asynchronous answers.")
