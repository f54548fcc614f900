"""Create, wait for and stop transform jobs."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from deploy.aws import Aws, error_code, pages, unless_missing
from deploy.batch.job import TransformJob, inputs, outputs
from deploy.deployer.calls import call, is_there
from deploy.deployer.wait import Progress, Report, polls
from deploy.diagnostics import advice
from deploy.errors import Failed, NotThere, Refused
from deploy.operations import logs
from deploy.resources.resource import TRANSFORM_LOGS, Kind, job_prefix
from deploy.s3.upload import counted

EVERY = 30.0
"""Seconds between two polls."""

_TAG_RUN = "lmi:run"
_RUNNING = ("InProgress", "Stopping")
_LOG_TAIL = 40
_MAX_LISTED = 20


def refuse_concurrent(aws: Aws, deployment: str, job: TransformJob) -> None:
    """Refuse a job if another running job of the deployment writes to the same output.

    Raises:
        Refused: another running job writes to the same output. The message names it.
    """
    output = job.request["TransformOutput"]["S3OutputPath"].rstrip("/")
    for status in _RUNNING:
        for name in _names(aws, job_prefix(deployment), StatusEquals=status):
            other = describe(aws, name)
            if other["TransformOutput"]["S3OutputPath"].rstrip("/") == output:
                raise Refused(
                    f"the job {name} is {status} and writes to the same output, {output}",
                    f"Wait for it (`lmi deploy batch --resume {name}`), stop it (`--stop {name}`), or pass another "
                    "--output.",
                )


def make_model(aws: Aws, deployment: str, job: TransformJob) -> bool:
    """Create the job's model unless it exists, and return whether it was created.

    Raises:
        Refused: a model with that name belongs to another owner.
    """
    if is_there(aws, Kind.MODEL, (job.model.name,), deployment):
        return False
    call(aws, "sagemaker", "create_model", job.model.request)
    return True


def name_of(aws: Aws, job: TransformJob) -> str:
    """Return a name for the job that ends in the next free number.

    If two jobs are created at the same time, they get the same name, and AWS accepts only one of them.
    """
    return f"{job.stem}-{_next_number(aws, job.stem)}"


def create(aws: Aws, job: TransformJob, name: str) -> None:
    """Create the transform job.

    Raises:
        Refused: a job with that name already exists.
    """
    run = {"Key": _TAG_RUN, "Value": uuid.uuid4().hex}
    request = {**job.request, "TransformJobName": name, "Tags": [*job.request["Tags"], run]}
    try:
        call(aws, "sagemaker", "create_transform_job", request)
    except ClientError as error:
        # boto3 repeats a call whose response was lost. The existing job is then the one that this call created.
        if error_code(error) != "ResourceInUse":
            raise
        if run not in aws.client("sagemaker").list_tags(ResourceArn=describe(aws, name)["TransformJobArn"])["Tags"]:
            raise Refused(
                f"the transform job {name} already exists",
                f"See it with `lmi deploy batch --resume {name}`, or pass another name (--job).",
            ) from None


def describe(aws: Aws, name: str, *, is_new: bool = False) -> dict[str, Any]:
    """Return AWS's description of a transform job. A job that was created just before may appear a little later.

    Raises:
        NotThere: the job does not exist.
    """
    request = {"TransformJobName": name}
    response = unless_missing(lambda: call(aws, "sagemaker", "describe_transform_job", request, is_new=is_new))
    if response is None:
        raise NotThere(f"there is no transform job {name} in {aws.region}", "Check the name and --region.")
    return response


def stop(aws: Aws, name: str) -> str:
    """Stop a running job, and return its status as a sentence. SageMaker stores no output for unfinished files."""
    status = describe(aws, name)["TransformJobStatus"]
    if status not in _RUNNING:
        return f"{name} is already {status}."
    call(aws, "sagemaker", "stop_transform_job", {"TransformJobName": name})
    return f"{name} is Stopping."


def wait(aws: Aws, name: str, report: Report, *, is_new: bool = False) -> list[str]:
    """Wait until a job ends, and return the URIs of its outputs.

    Args:
        is_new: whether the job was created just before.

    Raises:
        Failed: the job failed or was stopped. The advice contains the end of the log and the outputs written so far.
        NotThere: the job does not exist.
    """
    total: int | None = None

    def read() -> tuple[dict[str, Any], str]:
        nonlocal total
        job = describe(aws, name, is_new=is_new)
        total = _total(aws, job) if total is None else total
        return job, _phase(aws, job, total)

    for elapsed, (job, phase) in polls(read, _key(name), report, every=EVERY):
        status = job["TransformJobStatus"]
        report(Progress(_key(name), status, phase, elapsed, 0.0))
        if status == "Completed":
            return output_uris(aws, job)
        if status not in _RUNNING:
            raise _failure(aws, job)
    raise AssertionError("the polls never end")


def where(uris: list[str], output: str) -> list[str]:
    """Return lines of text that list the URIs of the outputs."""
    lines = [f"The outputs are under {output}:" if uris else f"The outputs are under {output}."]
    lines += [f"  {uri}" for uri in uris[:_MAX_LISTED]]
    return [*lines, f"  and {len(uris) - _MAX_LISTED} more"] if len(uris) > _MAX_LISTED else lines


def output_of(job: Mapping[str, Any]) -> str:
    return str(job["TransformOutput"]["S3OutputPath"])


def _key(name: str) -> str:
    return f"transform-job/{name}"


def _total(aws: Aws, job: Mapping[str, Any]) -> int:
    """Return the number of non-empty files to transform, or 0 if they cannot be listed."""
    try:
        source = job["TransformInput"]["DataSource"]["S3DataSource"]["S3Uri"]
        return sum(bool(item.size) for item in inputs(aws, source))
    except ClientError:
        return 0


def _phase(aws: Aws, job: Mapping[str, Any], total: int) -> str:
    if job["TransformJobStatus"] not in _RUNNING:
        return {"Completed": "done"}.get(job["TransformJobStatus"], "ended")
    if "TransformStartTime" not in job:
        return "finding instances, loading the model"
    return f"{len(output_uris(aws, job))} of {counted(total, 'file')} done" if total else "transforming"


def output_uris(aws: Aws, job: Mapping[str, Any]) -> list[str]:
    """Return the URIs of the outputs that the job has written, or [] if they cannot be listed."""
    try:
        return outputs(aws, output_of(job), since=job["CreationTime"].replace(microsecond=0))
    except ClientError:
        return []


def _failure(aws: Aws, job: Mapping[str, Any]) -> Failed:
    reason = str(job.get("FailureReason") or job["TransformJobStatus"])
    lines = _log(aws, job["TransformJobName"])
    hints = [advice(reason, lines)]
    if lines:
        hints += ["Last lines of the log:", *(f"  {line}" for line in lines[-10:])]
    if uris := output_uris(aws, job):
        hints += [f"{counted(len(uris), 'file')} finished before the job ended.", *where(uris, output_of(job))]
    return Failed(f"{_key(job['TransformJobName'])}: {reason}", "\n".join(hint for hint in hints if hint))


def _log(aws: Aws, name: str) -> list[str]:
    """Return the last lines of the newest log stream of the job's containers, or [] if they cannot be read."""
    try:
        return [line.text for line in logs.tail(aws, TRANSFORM_LOGS, _LOG_TAIL, prefix=f"{name}/") or []]
    except (ClientError, BotoCoreError):
        return []


def _names(aws: Aws, part: str, **more: str) -> Iterator[str]:
    """Yield the name of each job whose name begins with `part`."""
    for job in pages(aws, "sagemaker", "list_transform_jobs", "TransformJobSummaries", NameContains=part, **more):
        if job["TransformJobName"].startswith(part):
            yield job["TransformJobName"]


def _next_number(aws: Aws, stem: str) -> int:
    matches = (re.fullmatch(rf"{re.escape(stem)}-([0-9]+)", name) for name in _names(aws, stem))
    return max((int(match[1]) for match in matches if match is not None), default=0) + 1
