"""Build the requests for a transform job and its model, and check the job's input and output.

SageMaker does not accept uncompressed model data for batch transform (botocore's ContainerDefinition.ModelDataSource),
so the container itself downloads a model from a prefix in S3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from deploy.aws import Aws, pages
from deploy.errors import Refused, SpecError
from deploy.preflight.check import Check, error, ok, warning
from deploy.preflight.checks import quota, run
from deploy.resolve.decision import Decision, spec_on
from deploy.resources.build import spec_digest
from deploy.resources.endpoint_config import model
from deploy.resources.resource import Content, Json, Resource, batch_name, digest, job_prefix, tags, version_name
from deploy.s3.prefix import ARCHIVE, Prefix, bucket_and_key, check_region
from deploy.s3.upload import counted
from deploy.service_model import instance_types
from deploy.spec import Spec
from deploy.spec.components import MOST_TOGETHER, Batch
from deploy.spec.options import is_aws_image
from handler.config.options import KNOWN
from handler.core.numbers import whole
from handler.core.sizes import format_size

CONTENT_TYPE = "application/jsonlines"
"""LMI and this server read this content type as JSON, as it begins with `application/json`."""

_PAYLOAD = 6  # megabytes: SageMaker's default
_INSTANCES = 100  # maximum of TransformResources.InstanceCount, which only AWS's documentation states
_GPU_AMI = "al2-ami-sagemaker-batch-gpu-535"  # the newer of two AMIs, which only AWS's documentation lists


@dataclass(frozen=True)
class TransformJob:
    """A transform job to create.

    Attributes:
        model: model of the job, which must be created first.
        stem: common prefix of the names of all jobs with this input and output.
        request: arguments of CreateTransformJob, except for the name.
        warnings: warnings to print, one sentence each.
    """

    model: Resource
    stem: str
    request: Json
    warnings: tuple[str, ...]


def settings_of(spec: Spec) -> Batch:
    """Return the specification's `batch` section.

    Raises:
        SpecError: the specification has no such section.
    """
    if spec.batch is None:
        raise SpecError("batch: must be given", "Pass --input and --output, or add batch: to the specification.")
    return spec.batch


def transform_job(spec: Spec, decision: Decision, *, allow_plaintext_secret: bool = False) -> TransformJob:
    """Build the transform job and its model.

    Raises:
        Refused: batch transform does not support a setting of the specification.
        SpecError: the specification has no `batch` section, or its model cannot be built.
    """
    batch = settings_of(spec)
    if decision.pools:  # a job has only one instance type
        spec, decision = spec_on(spec, decision.pools[0]), decision.on(decision.pools[0])
    _check(spec, decision)
    job_tags = tags(spec.name, spec_digest(spec), spec.tags)
    job_model = _model(spec, decision, job_tags, allow_plaintext_secret=allow_plaintext_secret)
    concurrency, payload = amounts(spec)
    output = {"S3OutputPath": batch.output, "AssembleWith": "Line"}
    if spec.encryption.output_key is not None:
        output["KmsKeyId"] = spec.encryption.output_key
    request = {
        "ModelName": job_model.name,
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
        "TransformResources": _resources(spec, decision),
        "Tags": job_tags,
    }
    stem = f"{job_prefix(spec.name)}{digest([batch.input, batch.output])}"
    return TransformJob(job_model, stem, request, tuple(_warnings(spec, decision)))


def _resources(spec: Spec, decision: Decision) -> Content:
    """Return the instances of a job."""
    resources: Content = {"InstanceType": decision.instance_type, "InstanceCount": spec.instance.count}
    if decision.gpus:
        resources["TransformAmiVersion"] = _GPU_AMI
    if spec.encryption.volume_key is not None:
        resources["VolumeKmsKeyId"] = spec.encryption.volume_key
    return resources


def amounts(spec: Spec) -> tuple[int, int]:
    """Return the maximum number of concurrent requests per instance, and the maximum size of a request in MB."""
    batch = settings_of(spec)
    concurrency = batch.concurrency or max(1, min(MOST_TOGETHER // (batch.payload_mb or 1), _sequences(spec)))
    return concurrency, batch.payload_mb or max(1, min(_PAYLOAD, MOST_TOGETHER // concurrency))


def _sequences(spec: Spec) -> int:
    """Return the number of requests that the engine processes concurrently."""
    usual = KNOWN["option.max_rolling_batch_size"][0].default_with(str(spec.options.get("llm_engine", "")))
    sequences = spec.options.get("max_rolling_batch_size", spec.options.get("max_num_seqs", usual))
    try:
        return whole(str(sequences))
    except ValueError:  # the check of the environment reports it
        return 1


def _check(spec: Spec, decision: Decision) -> None:
    """Raise Refused for settings that batch transform does not support."""
    types = instance_types("TransformInstanceType")
    if (name := decision.instance_type) not in types:
        families = sorted({name.rpartition(".")[0] for name in types if name.startswith(("ml.g", "ml.p"))})
        raise Refused(
            f"instance.type: batch transform does not support {name}",
            f"Pass --instance-type (GPU families: {', '.join(families)}), or use an asynchronous endpoint (async).",
        )
    if spec.instance.count > _INSTANCES:
        raise Refused(f"instance.count: {spec.instance.count}, but a job may have at most {_INSTANCES}", "Use --count.")
    if spec.network.isolated and _fetches(decision):
        raise Refused(
            "network.isolated: the container of a job downloads the model from S3 itself, as SageMaker does not accept "
            "uncompressed model data for batch transform",
            "Set it to false for the job (--set network.isolated=false), or use an asynchronous endpoint.",
        )
    if str(spec.options.get("output_formatter")) in ("jsonlines", "sse"):
        raise Refused(
            f"options.output_formatter: {spec.options['output_formatter']}: each response must be one line",
            "Use json for batch transform (--set options.output_formatter=json).",
        )


def _model(spec: Spec, decision: Decision, job_tags: list[dict[str, str]], *, allow_plaintext_secret: bool) -> Resource:
    """Build the job's model as for an endpoint, but without adapters. The container downloads an S3 prefix itself."""
    environment = dict(spec.environment)
    if _fetches(decision):
        environment["HF_MODEL_ID"] = str(decision.model_data)
        decision = replace(decision, model_data=None)
    job_spec = spec.model_copy(update={"environment": environment, "components": ()})
    resource = model(job_spec, decision, job_tags, allow_plaintext_secret=allow_plaintext_secret)
    content = {name: value for name, value in resource.request.items() if name not in ("ModelName", "Tags")}
    name = version_name(batch_name(spec.name), content)
    return replace(resource, name=name, request={**resource.request, "ModelName": name})


def _fetches(decision: Decision) -> bool:
    """Return whether the container downloads the model data from S3. SageMaker unpacks archives itself."""
    return decision.model_data is not None and not decision.model_data.endswith(ARCHIVE)


def _warnings(spec: Spec, decision: Decision) -> Iterator[str]:
    if decision.gpus:
        yield (
            f"batch transform's newest AMI ({_GPU_AMI}) has driver 535, for CUDA 12.2: an image with a newer version "
            "needs the compatibility library that NVIDIA's images include"
        )
    if any(component.adapters for component in spec.components):
        yield "components.adapters: a job serves only the model, so a line that names an adapter gets an error"
    if spec.image.aws is not None or is_aws_image(decision.image) or _front(spec) != "embedded":
        yield (
            "DJL Serving responds to an invalid line with an error status, and SageMaker then writes no output for the "
            "whole file; this project's image with LMI_FRONT=embedded writes the error as that line's output"
        )


def _front(spec: Spec) -> str:
    return spec.environment.get("LMI_FRONT", "embedded")


# -- read-only checks of a job's input, output and quota, before the job costs money -----------------------------------


_MB = 2**20
_MOST_READ = 2**30  # maximum bytes of input to read in search of lines that are too long
_CHUNK = 2**20
_COMPRESSED = (".gz", ".bz2", ".xz", ".zip", ".zst")


class Input(NamedTuple):
    """An S3 object of the input, with its size in bytes."""

    key: str
    size: int


def checks(aws: Aws, spec: Spec, decision: Decision) -> list[Check]:
    """Check a job's input, output and quota. A missing read permission results only in a warning.

    Raises:
        BotoCoreError: there is no connection to AWS.
    """
    usage = f"{decision.instance_type} for transform job usage"
    count = spec.instance.count
    return [
        *run("input", lambda: _input(aws, spec)),
        *run("output", lambda: _output(aws, spec)),
        *run("quota", lambda: quota(aws, usage, count, count, "--instance-type")),
    ]


def inputs(aws: Aws, uri: str) -> list[Input]:
    """List the objects that a job reads: all objects whose key begins with the key in the URI."""
    bucket, key = bucket_and_key(uri)
    objects = pages(aws, "s3", "list_objects_v2", "Contents", Bucket=bucket, Prefix=key)
    return [Input(item["Key"], item["Size"]) for item in objects]


def _input(aws: Aws, spec: Spec) -> Iterator[Check]:
    batch = settings_of(spec)
    check_region(aws, Prefix(*bucket_and_key(batch.input)), "batch.input")
    there = inputs(aws, batch.input)
    full = [item for item in there if item.size]
    if not full:
        says = f"{batch.input}: " + (f"{counted(len(there), 'object')}, all empty" if there else "there is no object")
        yield error("input", says, "Set --input to an object of JSON lines, or to a prefix of such objects.")
        return
    yield ok("input", f"{batch.input}: {counted(len(full), 'object')}, {format_size(sum(item.size for item in full))}")
    if len(full) < (count := spec.instance.count):
        says = f"{counted(len(full), 'object')} for {counted(count, 'instance')}: "
        says += "each object is read by one instance, so some instances are idle"
        yield warning("input", says, "Split the objects, or pass a smaller --count.")
    if compressed := [item.key for item in full if item.key.endswith(_COMPRESSED)]:
        says = f"{counted(len(compressed), 'object')} may be compressed, such as {compressed[0]}"
        yield warning("input", says, "Store them uncompressed: each line is sent to the model unchanged.")
    yield from _lines(aws, spec, bucket_and_key(batch.input)[0], full)


def _lines(aws: Aws, spec: Spec, bucket: str, there: Sequence[Input]) -> Iterator[Check]:
    """Check objects for lines that exceed the size limit. At most `_MOST_READ` bytes are read in total."""
    maximum = amounts(spec)[1] * _MB
    left, unread = _MOST_READ, 0
    for item in there:
        if item.size <= maximum:
            continue
        if item.size > left:
            unread += 1
            continue
        left -= item.size
        body = aws.client("s3").get_object(Bucket=bucket, Key=item.key)["Body"]
        if (problem := too_long(iter(lambda: body.read(_CHUNK), b""), maximum)) is not None:  # noqa: B023
            yield error(
                "input",
                f"s3://{bucket}/{item.key}: line {problem} exceeds {amounts(spec)[1]} MB, so the file would fail",
                "Shorten the line, or raise batch.payload_mb (its product with batch.concurrency may be at most 100).",
            )
    if unread:
        unread_text = f"{counted(unread, 'object')} too large to check"
        yield warning("input", f"{unread_text}: a file fails if it has a line longer than {amounts(spec)[1]} MB")


def too_long(chunks: Iterable[bytes], maximum: int) -> int | None:
    """Return the 1-based index of the first line that exceeds `maximum` bytes, including its newline, or None."""
    number, length = 1, 0
    for chunk in chunks:
        first, *following = chunk.split(b"\n")
        length += len(first)
        for other in following:
            if length + 1 > maximum:
                return number
            number, length = number + 1, len(other)
        if length > maximum:
            return number
    return None


def _output(aws: Aws, spec: Spec) -> Iterator[Check]:
    batch = settings_of(spec)
    bucket, key = bucket_and_key(batch.output)
    check_region(aws, Prefix(bucket, key), "batch.output")
    source, start = bucket_and_key(batch.input)
    if source == bucket and f"{key.rstrip('/')}/".startswith(start):
        yield error(
            "output",
            f"{batch.output} is inside the input {batch.input}, so the next job would read this job's output",
            "Set --output to a prefix outside the input.",
        )
        return
    if there := outputs(aws, batch.output):
        says = f"{batch.output} already contains {counted(len(there), 'output')}, such as {there[0]}"
        yield warning("output", says, "Outputs for the same input objects are overwritten.")
        return
    yield ok("output", batch.output)


def outputs(aws: Aws, uri: str, since: Any = None) -> list[str]:
    """Return the URIs of the outputs (`*.out`) under an S3 URI.

    Args:
        since: omit outputs that were last modified before this time. None includes all outputs.
    """
    bucket, key = bucket_and_key(uri)
    folder = f"{key.rstrip('/')}/" if key else ""
    objects = pages(aws, "s3", "list_objects_v2", "Contents", Bucket=bucket, Prefix=folder)
    there = (item for item in objects if item["Key"].endswith(".out"))
    return [f"s3://{bucket}/{item['Key']}" for item in there if since is None or item["LastModified"] >= since]
