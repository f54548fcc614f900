"""Batch transform: split objects of the store, have the container answer each payload, assemble the answers.

The operations CreateTransformJob, DescribeTransformJob, ListTransformJobs and StopTransformJob, for stock boto3.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from deploy.emulator.access import check_signed
from deploy.emulator.answers import ApiError, validation_error
from deploy.emulator.endpoint import ACCOUNT, MIB, Endpoint
from deploy.emulator.relay import Relay
from deploy.emulator.store import Store
from deploy.service_model import Malformed, wrong_with

log = logging.getLogger("deploy.emulator")

Containers = Callable[[Mapping[str, str]], AbstractAsyncContextManager[str]]
"""Starts a job's own container with further variables, and yields its URL when it is ready."""

_TARGET = "X-Amz-Target"
_MOST = 100  # megabytes: MaxConcurrentTransforms * MaxPayloadInMB
_PARAMETERS = {"MaxConcurrentTransforms": 1, "BatchStrategy": "MULTI_RECORD", "MaxPayloadInMB": 6}
"""Where neither the job nor the container names them."""
_RETRIES, _SECONDS = 3, 600
"""InvocationsMaxRetries and InvocationsTimeoutInSeconds where the job does not name them."""
_ABSENT = ("DataProcessing", "DataCaptureConfig")
_RUNNING = ("InProgress", "Stopping")


class Splitting(NamedTuple):
    """The division of a job's input into payloads.

    Attributes:
        by_line: whether each line is a record; otherwise each object is one.
        single: whether a payload holds one record only.
        most: the maximum size of a payload in bytes.
        concurrent: the maximum number of payloads in flight.
    """

    by_line: bool
    single: bool
    most: int
    concurrent: int

    def payloads(self, data: bytes) -> Iterator[bytes]:
        """Yield the payloads of an object.

        Raises:
            ApiError: a record does not fit into a payload.
        """
        gathered = b""
        for record in re.findall(rb"[^\n]*\n|[^\n]+", data) if self.by_line else [data]:
            if len(record) > self.most:
                raise validation_error(f"a record of {len(record)} bytes: at most {self.most} (MaxPayloadInMB)")
            if gathered and (self.single or len(gathered) + len(record) > self.most):
                yield gathered
                gathered = b""
            gathered += record
        if gathered:
            yield gathered


@dataclass
class Job:
    """A job, and what DescribeTransformJob says of it."""

    request: Mapping[str, Any]
    arn: str
    status: str = "InProgress"
    failure: str = ""
    created: float = field(default_factory=time.time)
    ended: float | None = None

    @property
    def name(self) -> str:
        return str(self.request["TransformJobName"])

    def description(self) -> dict[str, Any]:
        return {**self.request, **self.summary()}

    def summary(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "TransformJobName": self.name,
            "TransformJobArn": self.arn,
            "TransformJobStatus": self.status,
            "CreationTime": self.created,
        }
        if self.failure:
            told["FailureReason"] = self.failure
        return told if self.ended is None else {**told, "TransformEndTime": self.ended}

    def end(self, status: str, failure: str = "") -> None:
        self.status, self.failure, self.ended = status, failure[:1024], time.time()


class TransformJobs:
    """The jobs of an emulator.

    Args:
        containers: as a real job, each starts one of its own; None: the endpoint's container answers.
    """

    def __init__(self, endpoint: Endpoint, store: Store, containers: Containers | None = None) -> None:
        self._endpoint = endpoint
        self._store = store
        self._containers = containers
        self._jobs: dict[str, Job] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def add(self, app: web.Application) -> None:
        app.router.add_post("/", self._call)

    async def close(self) -> None:
        """Give up all unfinished jobs."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _call(self, request: web.Request) -> web.Response:
        now = datetime.now(timezone.utc)
        region = check_signed(request.headers.get("Authorization"), request.query, self._endpoint.region, now)
        operation = request.headers.get(_TARGET, "").rpartition(".")[2]
        values = _values(operation, await request.read())
        answer: dict[str, Any] = {}
        if operation == "CreateTransformJob":
            answer = {"TransformJobArn": self._create(values, region)}
        elif operation == "DescribeTransformJob":
            answer = self._job(values).description()
        elif operation == "ListTransformJobs":
            answer = {"TransformJobSummaries": [job.summary() for job in self._listed(values)]}
        else:
            self._stop(self._job(values))
        return web.json_response(answer, content_type="application/x-amz-json-1.1")

    def _job(self, values: Mapping[str, Any]) -> Job:
        name = values["TransformJobName"]
        if name not in self._jobs:
            raise ApiError(400, "ValidationException", f"Could not find requested job with name: {name}")
        return self._jobs[name]

    def _listed(self, values: Mapping[str, Any]) -> list[Job]:
        part, status = values.get("NameContains", ""), values.get("StatusEquals")
        return [job for job in self._jobs.values() if part in job.name and status in (None, job.status)]

    def _stop(self, job: Job) -> None:
        if job.status not in _RUNNING:
            raise validation_error(f"The job {job.name} is {job.status}: it cannot be stopped.")
        job.status = "Stopping"
        self._tasks[job.name].cancel()

    def _create(self, values: dict[str, Any], region: str) -> str:
        name = values["TransformJobName"]
        if name in self._jobs:
            raise ApiError(400, "ResourceInUse", f"Job name must be unique: {name}")
        _check(values)
        job = self._jobs[name] = Job(values, f"arn:aws:sagemaker:{region}:{ACCOUNT}:transform-job/{name}")
        self._tasks[name] = asyncio.ensure_future(self._run(job, self._endpoint.log_stream(region)))
        return job.arn

    async def _run(self, job: Job, log_stream: str) -> None:
        """Transform each object; one that fails leaves no output, and the others are transformed all the same."""
        failed = []
        try:
            source = job.request["TransformInput"]["DataSource"]["S3DataSource"]["S3Uri"]
            uris = await asyncio.to_thread(self._store.list, source)
            async with self._relay(job) as relay:
                splitting = _splitting({**await _execution_parameters(relay), **_set(job.request)})
                for uri in uris:
                    try:
                        await self._transform(job, uri, splitting, relay, log_stream)
                    except ApiError as error:
                        failed.append(f"{uri}: {error}")
            job.end("Failed", f"ClientError: {failed[0]}") if failed else job.end("Completed")
        except asyncio.CancelledError:
            job.end("Stopped")
            raise
        except Exception as error:  # whoever describes the job is told
            job.end("Failed", f"ClientError: {error}")
        finally:
            log.info("transform job %s: %s %s", job.name, job.status, job.failure)

    @asynccontextmanager
    async def _relay(self, job: Job) -> AsyncIterator[Relay]:
        """Yield the way to the job's container."""
        given = {
            "SAGEMAKER_MAX_PAYLOAD_IN_MB": job.request.get("MaxPayloadInMB"),
            "SAGEMAKER_MAX_CONCURRENT_TRANSFORMS": job.request.get("MaxConcurrentTransforms"),
            "SAGEMAKER_BATCH_STRATEGY": _STRATEGIES.get(job.request.get("BatchStrategy", "")),
        }
        variables = {name: str(value) for name, value in given.items() if value}
        variables |= {**job.request.get("Environment", {}), "SAGEMAKER_BATCH": "true"}
        async with self._containers(variables) if self._containers else _running(self._endpoint.container) as url:
            relay = Relay(url)
            await relay.open()
            try:
                yield relay
            finally:
                await relay.close()

    async def _transform(self, job: Job, uri: str, splitting: Splitting, relay: Relay, log_stream: str) -> None:
        """Write the answers to one object, in the order of its payloads."""
        output, settings = job.request["TransformOutput"], job.request.get("ModelClientConfig", {})
        headers = {"Content-Type": job.request["TransformInput"].get("ContentType", "")}
        if accept := output.get("Accept"):
            headers["Accept"] = accept
        seconds = settings.get("InvocationsTimeoutInSeconds", _SECONDS)
        retries = settings.get("InvocationsMaxRetries", _RETRIES)
        payloads = enumerate(splitting.payloads(await asyncio.to_thread(self._store.read, uri)))
        answers: dict[int, bytes] = {}

        async def work() -> None:
            for number, payload in payloads:
                for left in range(retries, -1, -1):
                    try:
                        _, answers[number] = await relay.whole(payload, headers, seconds, log_stream)
                        break
                    except ApiError:
                        if not left:
                            raise

        workers = [asyncio.ensure_future(work()) for _ in range(splitting.concurrent)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        end = b"\n" if output.get("AssembleWith") == "Line" else b""
        folder = job.request["TransformInput"]["DataSource"]["S3DataSource"]["S3Uri"].rpartition("/")[0]
        target = f"{output['S3OutputPath'].rstrip('/')}/{uri.removeprefix(f'{folder}/')}.out"
        data = b"".join(answers[number] + end for number in sorted(answers))
        await asyncio.to_thread(self._store.write, target, data)


def _values(operation: str, body: bytes) -> dict[str, Any]:
    """Read the request of an operation, as botocore's description of SageMaker has it.

    Raises:
        ApiError: no such operation, no JSON, or a member violates its description.
    """
    if operation not in _OPERATIONS:
        raise ApiError(400, "UnknownOperationException", f"No operation {operation} here.")
    try:
        values = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        raise ApiError(400, "SerializationException", "The body is not JSON.") from None
    try:
        text = wrong_with("sagemaker", operation, values)
    except Malformed as error:
        raise ApiError(400, "SerializationException", str(error)) from None
    if text:
        raise ApiError(400, "ValidationException", text)
    return dict(values)


_OPERATIONS = ("CreateTransformJob", "DescribeTransformJob", "ListTransformJobs", "StopTransformJob")

_STRATEGIES = {"SingleRecord": "SINGLE_RECORD", "MultiRecord": "MULTI_RECORD"}
"""What a container says of CreateTransformJob's words."""


@asynccontextmanager
async def _running(url: str) -> AsyncIterator[str]:
    yield url


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a job sets: 0 leaves a number to the container."""
    return {name: value for name, value in values.items() if value}


def _check(values: Mapping[str, Any]) -> None:
    """Refuse what the emulator does not do, and what SageMaker refuses at once.

    Raises:
        ApiError: naming the field.
    """
    given, source = values["TransformInput"], values["TransformInput"]["DataSource"]["S3DataSource"]
    absent = [name for name in _ABSENT if values.get(name)]
    if (split := given.get("SplitType", "None")) not in ("None", "Line"):
        absent.append(f"SplitType {split}")
    if (compressed := given.get("CompressionType", "None")) != "None":
        absent.append(f"CompressionType {compressed}")
    if (kind := source["S3DataType"]) != "S3Prefix":
        absent.append(f"S3DataType {kind}")
    if absent:
        raise validation_error(f"{', '.join(absent)}: the emulator has S3Prefix, and splits by Line only.")
    _splitting(values)


def _splitting(values: Mapping[str, Any]) -> Splitting:
    """Read how to split, from the job and what the container says, else by SageMaker's defaults.

    Raises:
        ApiError: the payloads are too large together.
    """
    parameters = {**_PARAMETERS, **{key: value for key in _PARAMETERS if (value := values.get(key))}}
    concurrent, most = parameters["MaxConcurrentTransforms"], parameters["MaxPayloadInMB"]
    if concurrent * most > _MOST:
        raise validation_error(f"MaxConcurrentTransforms * MaxPayloadInMB is {concurrent * most}: at most {_MOST}.")
    by_line = values["TransformInput"].get("SplitType") == "Line"
    single = parameters["BatchStrategy"] in ("SINGLE_RECORD", "SingleRecord")
    return Splitting(by_line, single, most * MIB, concurrent)


async def _execution_parameters(relay: Relay) -> dict[str, Any]:
    try:
        async with relay.get("/execution-parameters", 2.0) as reply:
            return dict(await reply.json()) if reply.status == 200 else {}
    except (aiohttp.ClientError, asyncio.TimeoutError):
        return {}
