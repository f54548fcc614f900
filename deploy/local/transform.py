"""Batch transform: split objects of the store, have the container answer each payload, assemble the answers.

CreateTransformJob and DescribeTransformJob of SageMaker's own API, for stock boto3. The endpoint's container answers; a
real job starts containers of its own, with SAGEMAKER_BATCH=true.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from deploy.local.access import check_signed
from deploy.local.answers import ApiError, validation_error
from deploy.local.endpoint import ACCOUNT, MIB, Endpoint
from deploy.local.relay import Relay
from deploy.local.store import Store

log = logging.getLogger("deploy.local")

_TARGET = "X-Amz-Target"
_MOST = 100  # megabytes: MaxConcurrentTransforms * MaxPayloadInMB
_PARAMETERS = {"MaxConcurrentTransforms": 1, "BatchStrategy": "MULTI_RECORD", "MaxPayloadInMB": 6}
"""Where neither the job nor the container names them."""


class Splitting(NamedTuple):
    """How a job splits its input into payloads.

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
        for record in data.splitlines(keepends=True) if self.by_line else [data]:
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

    def description(self) -> dict[str, Any]:
        told = {"TransformJobArn": self.arn, "TransformJobStatus": self.status, "CreationTime": self.created}
        return {**self.request, **told, **({"FailureReason": self.failure} if self.failure else {})}


class TransformJobs:
    """The jobs of an emulator."""

    def __init__(self, endpoint: Endpoint, relay: Relay, store: Store) -> None:
        self._endpoint = endpoint
        self._relay = relay
        self._store = store
        self._jobs: dict[str, Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, app: web.Application) -> None:
        app.router.add_post("/", self._call)

    async def close(self) -> None:
        """Give up all unfinished jobs."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _call(self, request: web.Request) -> web.Response:
        now = datetime.now(timezone.utc)
        region = check_signed(request.headers.get("Authorization"), request.query, self._endpoint.region, now)
        operation, values = request.headers.get(_TARGET, "").rpartition(".")[2], json.loads(await request.read())
        if operation == "CreateTransformJob":
            answer = {"TransformJobArn": await self._create(values, region)}
        elif operation == "DescribeTransformJob":
            answer = self._described(values["TransformJobName"])
        else:
            raise ApiError(400, "UnknownOperationException", f"No operation {operation} here.")
        return web.json_response(answer, content_type="application/x-amz-json-1.1")

    def _described(self, name: str) -> dict[str, Any]:
        if name not in self._jobs:
            raise validation_error(f"Could not find requested job with name: {name}")
        return self._jobs[name].description()

    async def _create(self, values: dict[str, Any], region: str) -> str:
        name = values["TransformJobName"]
        if name in self._jobs:
            raise ApiError(400, "ResourceInUse", f"Job name must be unique: {name}")
        splitting = await self._splitting(values)
        job = self._jobs[name] = Job(values, f"arn:aws:sagemaker:{region}:{ACCOUNT}:transform-job/{name}")
        task = asyncio.ensure_future(self._run(job, splitting, self._endpoint.log_stream(region)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return job.arn

    async def _splitting(self, values: Mapping[str, Any]) -> Splitting:
        """Read how to split, from the job, else from the container, else by SageMaker's defaults."""
        split = values["TransformInput"].get("SplitType", "None")
        if split not in ("None", "Line"):
            raise validation_error(f"SplitType {split}: the emulator splits by Line only.")
        parameters = {**_PARAMETERS, **await self._execution_parameters()}
        parameters |= {key: value for key in _PARAMETERS if (value := values.get(key))}
        concurrent, most = parameters["MaxConcurrentTransforms"], parameters["MaxPayloadInMB"]
        if concurrent * most > _MOST:
            raise validation_error(f"MaxConcurrentTransforms * MaxPayloadInMB is {concurrent * most}: at most {_MOST}.")
        single = parameters["BatchStrategy"] in ("SINGLE_RECORD", "SingleRecord")
        return Splitting(split == "Line", single, most * MIB, concurrent)

    async def _execution_parameters(self) -> dict[str, Any]:
        try:
            async with self._relay.get("/execution-parameters", 2.0) as reply:
                return dict(await reply.json()) if reply.status == 200 else {}
        except (aiohttp.ClientError, asyncio.TimeoutError):
            return {}

    async def _run(self, job: Job, splitting: Splitting, log_stream: str) -> None:
        try:
            source = job.request["TransformInput"]["DataSource"]["S3DataSource"]["S3Uri"]
            for uri in await asyncio.to_thread(self._store.list, source):
                await self._transform(job, uri, splitting, log_stream)
            job.status = "Completed"
        except Exception as error:  # whoever describes the job is told
            log.info("transform job %s: %s", job.request["TransformJobName"], error)
            job.status, job.failure = "Failed", f"ClientError: {error}"[:1024]

    async def _transform(self, job: Job, uri: str, splitting: Splitting, log_stream: str) -> None:
        """Write the answers to one object, in the order of its payloads."""
        output, settings = job.request["TransformOutput"], job.request.get("ModelClientConfig", {})
        headers = {"Content-Type": job.request["TransformInput"].get("ContentType", "")}
        if accept := output.get("Accept"):
            headers["Accept"] = accept
        seconds, retries = settings.get("InvocationsTimeoutInSeconds", 600), settings.get("InvocationsMaxRetries", 0)
        payloads = enumerate(splitting.payloads(await asyncio.to_thread(self._store.read, uri)))
        answers: dict[int, bytes] = {}

        async def work() -> None:
            for number, payload in payloads:
                for left in range(retries, -1, -1):
                    try:
                        _, answers[number] = await self._relay.whole(payload, headers, seconds, log_stream)
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
        end = b"\n" if output.get("AssembleWith") == "Line" else b""
        target = f"{output['S3OutputPath'].rstrip('/')}/{uri.rpartition('/')[2]}.out"
        data = b"".join(answers[number] + end for number in sorted(answers))
        await asyncio.to_thread(self._store.write, target, data)
