"""InvokeEndpointAsync: accept a request, process it later, write the answer to the store."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from deploy.emulator.answers import INFERENCE_ID, validation_error
from deploy.emulator.endpoint import Endpoint
from deploy.emulator.relay import Relay
from deploy.emulator.store import Store

log = logging.getLogger("deploy.emulator")

BUCKET = "sagemaker-local"
"""Bucket of the answers, below async-out/ and async-failures/."""
CONCURRENT = 4
"""Concurrent requests to the container; SageMaker's default of MaxConcurrentInvocationsPerInstance."""

_AMZN = "X-Amzn-SageMaker-"
_FILENAME = re.compile(r"(?!.*\..*\.)[a-zA-Z0-9][a-zA-Z0-9_.-]{0,31}")
_EXTENSION = re.compile(r"(?!s3:|https:)[a-zA-Z0-9!_.*'()/-]{1,512}")


@dataclass(frozen=True)
class AsyncRequest:
    """An accepted request, and the place of its answer.

    Args:
        input: an s3:// URI, or the body.
        ttl: seconds that it may wait.
        timeout: seconds that the container may take.
    """

    inference_id: str
    input: str | bytes
    passed: Mapping[str, str]
    output: str
    failure: str
    ttl: int
    timeout: float

    @property
    def headers(self) -> dict[str, str]:
        return {_AMZN + "OutputLocation": self.output, _AMZN + "FailureLocation": self.failure}


class AsyncCalls:
    """The queue of an asynchronous endpoint."""

    def __init__(self, endpoint: Endpoint, store: Store) -> None:
        self._endpoint = endpoint
        self._store = store
        self._room = asyncio.Semaphore(CONCURRENT)
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(
        self, headers: Mapping[str, str], passed: Mapping[str, str], body: bytes, log_stream: str, relay: Relay
    ) -> AsyncRequest:
        """Queue a request.

        Args:
            passed: headers for the container.
            log_stream: ARN of the log, for errors.
            relay: calls the container.

        Raises:
            ApiError: it violates the API's rules.
        """
        location = headers.get(_AMZN + "InputLocation")
        if (location is None) == (not body):
            raise validation_error("Exactly one of InputLocation and Body must be given.")
        if len(body) > self._endpoint.limits.inline_body:
            raise validation_error(f"Body of {len(body)} bytes: at most {self._endpoint.limits.inline_body} inline.")
        if location is not None:
            self._store.path(location)
        request_id = passed.get(INFERENCE_ID) or str(uuid.uuid4())
        extension = _text(headers, "S3OutputPathExtension", _EXTENSION)
        filename = _text(headers, "Filename", _FILENAME)
        folder = f"{extension.strip('/')}/" if extension else ""
        accepted = AsyncRequest(
            inference_id=request_id,
            input=location or body,
            passed={**passed, INFERENCE_ID: request_id},
            output=f"s3://{BUCKET}/async-out/{folder}{filename or f'{uuid.uuid4()}.out'}",
            failure=f"s3://{BUCKET}/async-failures/{folder}{filename or f'{uuid.uuid4()}-error.out'}",
            ttl=_number(headers, "RequestTTLSeconds", 60, 21600, 21600),
            timeout=_number(headers, "InvocationTimeoutSeconds", 1, 3600, int(self._endpoint.limits.asynchronous)),
        )
        self._store.path(accepted.output)
        task = asyncio.ensure_future(self._run(accepted, log_stream, relay))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return accepted

    async def close(self) -> None:
        """Give up all unfinished requests."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, call: AsyncRequest, log_stream: str, relay: Relay) -> None:
        began = time.monotonic()
        async with self._room:
            try:
                if time.monotonic() - began > call.ttl:
                    raise validation_error(f"The request waited for more than {call.ttl} s and has expired.")
                body = call.input
                if isinstance(body, str):
                    body = await asyncio.to_thread(self._store.read, body)
                _, data = await relay.whole(body, call.passed, call.timeout, log_stream)
                await asyncio.to_thread(self._store.write, call.output, data)
            except Exception as error:  # tell whoever waits for the answer
                log.info("asynchronous request %s: %s", call.inference_id, error)
                await self._write_failure(call, str(error))

    async def _write_failure(self, call: AsyncRequest, why: str) -> None:
        try:
            await asyncio.to_thread(self._store.write, call.failure, why.encode("utf-8", "replace"))
        except OSError:
            log.exception("asynchronous request %s: its failure could not be written", call.inference_id)


def _text(headers: Mapping[str, str], name: str, pattern: re.Pattern[str]) -> str:
    value = headers.get(_AMZN + name)
    if value is not None and not pattern.fullmatch(value):
        raise validation_error(f"{name} {value!r} must match {pattern.pattern}.")
    return value or ""


def _number(headers: Mapping[str, str], name: str, least: int, most: int, default: int) -> int:
    text = headers.get(_AMZN + name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or not least <= int(text) <= most:
        raise validation_error(f"{name} {text!r} must be a number from {least} to {most}.")
    return int(text)
