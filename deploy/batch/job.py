"""Build a transform job and the model that it needs (CreateTransformJob, CreateModel). Pure.

SageMaker takes no uncompressed model data for batch transform (botocore's ContainerDefinition.ModelDataSource), so the
container fetches a model in S3 by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from deploy.errors import Refused, SpecError
from deploy.resolve.decision import Decision, spec_on
from deploy.resources.build import spec_digest
from deploy.resources.model import model
from deploy.resources.names import batch_name, digest, job_prefix, tags, version_name
from deploy.resources.resource import Json, Resource
from deploy.service_model import instance_types
from deploy.spec import Spec
from deploy.spec.batch import MOST_TOGETHER, Batch
from deploy.spec.options import is_aws_image
from handler.config.options import KNOWN

CONTENT_TYPE = "application/jsonlines"
"""LMI and this server read it as JSON: its first part is JSON's type."""

_PAYLOAD = 6  # megabytes: SageMaker's own default
_INSTANCES = 100  # maximum of TransformResources.InstanceCount, in prose only
_GPU_AMI = "al2-ami-sagemaker-batch-gpu-535"  # the newer of two, in prose only


@dataclass(frozen=True)
class BatchJob:
    """A job to create.

    Attributes:
        model: created before it.
        stem: the beginning of the names of all jobs with this input and output.
        request: CreateTransformJob's arguments, without a name.
        warnings: one sentence each.
    """

    model: Resource
    stem: str
    request: Json
    warnings: tuple[str, ...]


def settings_of(spec: Spec) -> Batch:
    """Return the section.

    Raises:
        SpecError: the specification has none.
    """
    if spec.batch is None:
        raise SpecError("batch: must be given", "Give --input and --output, or write batch: into the specification.")
    return spec.batch


def batch_job(spec: Spec, decision: Decision, *, allow_plaintext_secret: bool = False) -> BatchJob:
    """Build the job.

    Raises:
        Refused: batch transform cannot do what the specification says.
        SpecError: as `resources.build`.
    """
    batch = settings_of(spec)
    if decision.pools:  # a job has one type
        spec, decision = spec_on(spec, decision.pools[0]), decision.on(decision.pools[0])
    _check(spec, decision)
    marks = tags(spec.name, spec_digest(spec), spec.tags)
    made = _model(spec, decision, marks, allow_plaintext_secret=allow_plaintext_secret)
    concurrency, payload = amounts(spec)
    resources: dict[str, Any] = {"InstanceType": decision.instance_type, "InstanceCount": spec.instance.count}
    if decision.gpus:
        resources["TransformAmiVersion"] = _GPU_AMI
    if spec.encryption.volume_key is not None:
        resources["VolumeKmsKeyId"] = spec.encryption.volume_key
    output = {"S3OutputPath": batch.output, "AssembleWith": "Line"}
    if spec.encryption.output_key is not None:
        output["KmsKeyId"] = spec.encryption.output_key
    request = {
        "ModelName": made.name,
        "BatchStrategy": "SingleRecord",
        "MaxConcurrentTransforms": concurrency,
        "MaxPayloadInMB": payload,
        "ModelClientConfig": {"InvocationsTimeoutInSeconds": batch.timeout, "InvocationsMaxRetries": batch.retries},
        "TransformInput": {
            "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": batch.input}},
            "ContentType": CONTENT_TYPE,
            "SplitType": "Line",
        },
        "TransformOutput": output,
        "TransformResources": resources,
        "Tags": marks,
    }
    stem = f"{job_prefix(spec.name)}{digest([batch.input, batch.output])}"
    return BatchJob(made, stem, request, tuple(_warnings(spec, decision)))


def amounts(spec: Spec) -> tuple[int, int]:
    """Return the number of requests at a time, and the megabytes that one may have; what is not given follows."""
    batch = settings_of(spec)
    given = batch.concurrency or (MOST_TOGETHER // batch.payload_mb if batch.payload_mb is not None else MOST_TOGETHER)
    concurrency = batch.concurrency or max(1, min(given, _sequences(spec)))
    return concurrency, batch.payload_mb or max(1, min(_PAYLOAD, MOST_TOGETHER // concurrency))


def _sequences(spec: Spec) -> int:
    """Return how many requests the engine takes at once."""
    usual = KNOWN["option.max_rolling_batch_size"][0].default_with(str(spec.options.get("llm_engine", "")))
    named = spec.options.get("max_rolling_batch_size", spec.options.get("max_num_seqs", usual))
    try:
        return int(named)
    except ValueError:  # the environment's check names it
        return 1


def _check(spec: Spec, decision: Decision) -> None:
    """Raise Refused for what a job cannot have."""
    there = instance_types("TransformInstanceType")
    if (name := decision.instance_type) not in there:
        families = sorted({one.rpartition(".")[0] for one in there if one.startswith(("ml.g", "ml.p"))})
        raise Refused(
            f"instance.type: batch transform has no {name}",
            f"Give --instance-type; with GPUs it has {', '.join(families)}. Or use an asynchronous endpoint (async).",
        )
    if spec.instance.count > _INSTANCES:
        raise Refused(f"instance.count: {spec.instance.count}, and a job takes {_INSTANCES}", "Give --count.")
    if spec.network.isolated and decision.model_data is not None:
        raise Refused(
            "network.isolated: a job's container fetches the model from S3 by itself, as SageMaker takes no "
            "uncompressed model data for batch transform",
            "Set network.isolated to false for it (--set network.isolated=false), or use an asynchronous endpoint.",
        )
    if str(spec.options.get("output_formatter")) in ("jsonlines", "sse"):
        raise Refused(
            f"options.output_formatter: {spec.options['output_formatter']}: each answer must be one line",
            "Leave it out for batch transform (--set options.output_formatter=json).",
        )


def _model(spec: Spec, decision: Decision, marks: list[dict[str, str]], *, allow_plaintext_secret: bool) -> Resource:
    """Build the model: that of an endpoint, but the container fetches its data from S3, and knows no adapters."""
    environment = dict(spec.environment)
    if decision.model_data is not None:
        environment["HF_MODEL_ID"] = decision.model_data
    on_its_own = spec.model_copy(update={"environment": environment, "components": ()})
    made = model(on_its_own, replace(decision, model_data=None), marks, allow_plaintext_secret=allow_plaintext_secret)
    content = {name: value for name, value in made.request.items() if name not in ("ModelName", "Tags")}
    name = version_name(batch_name(spec.name), content)
    return replace(made, name=name, request={**made.request, "ModelName": name})


def _warnings(spec: Spec, decision: Decision) -> Iterator[str]:
    if decision.gpus:
        yield (
            f"batch transform's newest host ({_GPU_AMI}) has driver 535, for CUDA 12.2: an image for a newer CUDA "
            "needs the compatibility library that NVIDIA's images have"
        )
    if any(component.adapters for component in spec.components):
        yield "components.adapters: a job has the model alone; a line that names an adapter gets an error"
    if spec.image.aws is not None or is_aws_image(decision.image) or _front(spec) != "embedded":
        yield (
            "DJL Serving fails a request that it refuses, and then SageMaker writes nothing of that file; this "
            "project's image with LMI_FRONT=embedded answers with the error in the line's place"
        )


def _front(spec: Spec) -> str:
    return spec.environment.get("LMI_FRONT", "embedded")
