"""Batch transform jobs, which moto does not support. They follow botocore's API model and use the role's permissions.

A job starts on its first poll and ends `SageMaker.polls` polls later. As in a real job with this project's image, a 4xx
response of the container is also written as output. A job without a BatchStrategy sends one record per request, which
is the strategy that the server in the image reports at /execution-parameters.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError
from moto.core.exceptions import ServiceException
from moto.sagemaker.responses import SageMakerResponse

from deploy.emulator.authorization import RoleStore, Where
from deploy.emulator.patch import Replacements, methods, result
from deploy.emulator.sagemaker import ACCOUNT, Change, Invalid, Thing, listed, page
from deploy.s3.prefix import bucket_and_key

if TYPE_CHECKING:
    from deploy.emulator.cloud import Cloud

log = logging.getLogger("deploy.emulator")

KIND = "transform-job"
_MB = 2**20
_PAYLOAD = 6  # megabytes; SageMaker's default of MaxPayloadInMB


class InUse(ServiceException):
    code = "ResourceInUse"


class TransformJobOperations:
    """SageMaker's operations for transform jobs, each named as in boto3."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._jobs = cloud.sagemaker

    def create_transform_job(self, p: dict[str, Any], region: str) -> dict[str, Any]:
        name = p["TransformJobName"]
        if (KIND, name) in self._jobs.things:
            raise InUse(f"Job name must be unique within an AWS account and region, and {name} is in use.")
        model = self._jobs.get("model", p["ModelName"])
        container = model.request["PrimaryContainer"]
        if "ModelDataSource" in container:
            raise Invalid("Model data sources are not supported for batch transform.")
        concurrent, payload = p.get("MaxConcurrentTransforms", 0), p.get("MaxPayloadInMB", _PAYLOAD)
        if payload > 100 or concurrent * payload > 100:
            raise Invalid(f"MaxConcurrentTransforms * MaxPayloadInMB must be at most 100, not {concurrent * payload}.")
        if p.get("BatchStrategy") and p["TransformInput"].get("SplitType", "None") == "None":
            raise Invalid("BatchStrategy requires SplitType.")
        if p["TransformResources"]["InstanceCount"] > 100:
            raise Invalid("InstanceCount must be at most 100.")
        if unsupported := list(_unsupported(p)):
            raise Invalid(f"The emulator does not support {', '.join(unsupported)}.")
        job = self._jobs.create(KIND, name, p, region)
        job.status = "InProgress"
        role = model.request["ExecutionRoleArn"]  # read now because the model may be deleted while the job runs
        job.change = Change(self._jobs.polls, lambda: self._run(job, role, region))
        return {"TransformJobArn": job.arn}

    def describe_transform_job(self, p: dict[str, Any], region: str) -> dict[str, Any]:
        job = self._job(p["TransformJobName"])
        started = job.change is None or job.change.left < self._jobs.polls
        job.look()
        description = {**copy.deepcopy(job.request), **_summary(job)}
        return {**description, "TransformStartTime": job.created} if started or job.change is None else description

    def list_transform_jobs(self, p: dict[str, Any], region: str) -> dict[str, Any]:
        jobs = listed((job for (kind, _), job in self._jobs.things.items() if kind == KIND), p)
        page_jobs, more = page(jobs, p)
        return {"TransformJobSummaries": [_summary(job) for job in page_jobs], **more}

    def stop_transform_job(self, p: dict[str, Any], region: str) -> None:
        job = self._job(p["TransformJobName"])
        if job.status != "InProgress":
            raise Invalid(f"The job is {job.status} and cannot be stopped.")
        job.status = "Stopping"

        def end() -> None:
            job.status = "Stopped"

        job.change = Change(self._jobs.polls, end)

    def _job(self, name: str) -> Thing:
        if (KIND, name) not in self._jobs.things:
            raise Invalid(f"Could not find requested job with name: {name}")
        return self._jobs.things[KIND, name]

    def _run(self, job: Thing, role: str, region: str) -> None:
        """Run a job. Its status changes only at the end, because it may be polled while it runs."""
        try:
            reason = self._transform(job.request, role, region)
        except PermissionError as error:
            reason = f"ClientError: {error}"
        except ClientError as error:  # for example, the bucket does not exist
            reason = f"ClientError: {error.response['Error']['Message']}"
        except Exception:
            log.exception("the transform job %s failed", job.name)
            reason = "InternalServerError: We encountered an internal error. Please try again."
        job.status, job.reason = ("Failed", reason) if reason else ("Completed", None)

    def _transform(self, request: dict[str, Any], role: str, region: str) -> str:
        """Transform the job's objects. Return the reason for the last failure, or "" if all objects succeeded.
        An object that fails gets no output and does not stop the other objects. An input without objects is also a
        failure.
        """
        source, output = request["TransformInput"]["DataSource"]["S3DataSource"]["S3Uri"], request["TransformOutput"]
        store = RoleStore(self._cloud, role, Where(region, ACCOUNT), output.get("KmsKeyId"))
        keys = store.keys(source)
        failure = "" if keys else f"ClientError: No objects found at {source}"
        bucket, prefix = bucket_and_key(source)
        for key in keys:
            try:
                self._transform_object(
                    request, store, f"s3://{bucket}/{key}", _target(output["S3OutputPath"], prefix, key)
                )
            except ValueError as error:
                failure = f"ClientError: {key}: {error}"
        return failure

    def _transform_object(self, request: dict[str, Any], store: RoleStore, uri: str, target: str) -> None:
        body = store.read(uri)
        store.check(*store.writing(target))
        store.write(target, self._responses(body, request))

    def _responses(self, body: bytes, request: dict[str, Any]) -> bytes:
        """Return the container's responses to an object's payloads, joined in order.

        Raises:
            ValueError: a record is too large, or the container failed.
        """
        end = b"\n" if request["TransformOutput"].get("AssembleWith") == "Line" else b""
        content_type = request["TransformInput"].get("ContentType", "")
        responses = (self._cloud.transform(payload, content_type) for payload in _payloads(body, request))
        return b"".join(response.removesuffix(end) + end for response in responses)


def _unsupported(request: dict[str, Any]) -> Iterator[str]:
    """Yield the job's settings that the emulator does not support."""
    transform_input, source = request["TransformInput"], request["TransformInput"]["DataSource"]["S3DataSource"]
    yield from (name for name in ("DataProcessing", "DataCaptureConfig") if request.get(name))
    if (split := transform_input.get("SplitType", "None")) not in ("None", "Line"):
        yield f"SplitType {split}"
    if (compressed := transform_input.get("CompressionType", "None")) != "None":
        yield f"CompressionType {compressed}"
    if (kind := source["S3DataType"]) != "S3Prefix":
        yield f"S3DataType {kind}"


def _payloads(body: bytes, request: dict[str, Any]) -> Iterator[bytes]:
    """Yield an object's payloads.

    With SplitType Line, each line is a record; otherwise the whole object is one record. With BatchStrategy
    MultiRecord, a payload contains as many records as fit into MaxPayloadInMB; otherwise it contains one record.

    Raises:
        ValueError: a record is larger than MaxPayloadInMB.
    """
    by_line = request["TransformInput"].get("SplitType") == "Line"
    several, limit = request.get("BatchStrategy") == "MultiRecord", request.get("MaxPayloadInMB", _PAYLOAD) * _MB
    gathered = b""
    for record in re.findall(rb"[^\n]*\n|[^\n]+", body) if by_line else [body]:
        if len(record.removesuffix(b"\n")) > limit:
            raise ValueError("a record is larger than MaxPayloadInMB")
        if gathered and not (several and len(gathered) + len(record) <= limit):
            yield gathered
            gathered = b""
        gathered += record
    if gathered:
        yield gathered


def _target(output: str, prefix: str, key: str) -> str:
    below = key.removeprefix(prefix.rpartition("/")[0]).lstrip("/")
    return f"{output.rstrip('/')}/{below}.out"


def _summary(job: Thing) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "TransformJobName": job.name,
        "TransformJobArn": job.arn,
        "TransformJobStatus": job.status,
        "CreationTime": job.created,
    }
    if job.status not in ("InProgress", "Stopping"):  # `job.change` is None while the job runs
        summary |= {"TransformEndTime": job.modified}
    return {**summary, "FailureReason": job.reason} if job.reason else summary


def replacements(cloud: Cloud) -> Replacements:
    """Return the operations for transform jobs as replacements for moto's operations."""
    return [(SageMakerResponse, methods(TransformJobOperations(cloud), result))]
