"""A SageMaker endpoint as a target. It is called with the client of `lmi deploy`, which uses boto3 on threads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from botocore.config import Config

from deploy.client.errors import FROM_AWS, ModelBusy, NotStarted, RequestFailed, Unreachable, failure
from deploy.client.runtime import IMPATIENT, Runtime, Timeouts
from handler.core.errors import ConfigError
from proof.bench.client import BodyReader
from proof.replay.comparison import traits
from proof.replay.exchange import ATTRIBUTES, EMULATED, Request, Response, lost, times_of
from proof.replay.targets import Attempt

_ARGUMENTS = {
    "content-type": "ContentType",
    "accept": "Accept",
    ATTRIBUTES: "CustomAttributes",
    "x-amzn-sagemaker-target-model": "TargetModel",
    "x-amzn-sagemaker-target-variant": "TargetVariant",
    "x-amzn-sagemaker-session-id": "SessionId",
}
"""Maps headers that SageMaker forwards to the names of the corresponding boto3 arguments."""


_SHORTLY = Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 1})


class SageMakerTarget:
    """A SageMaker endpoint.

    Args:
        name: the name of the endpoint or, if it has several inference components, ENDPOINT/COMPONENT.
        concurrency: the maximum number of concurrent requests.

    Raises:
        ConfigError: no AWS region is configured.
    """

    def __init__(self, name: str, timeout: float, concurrency: int) -> None:
        endpoint, _, component = name.partition("/")
        timeouts = Timeouts(answer=min(timeout, 70.0), gap=min(timeout, 120.0))
        try:
            self._runtime = Runtime(
                endpoint, component=component or None, patience=IMPATIENT, timeouts=timeouts, connections=concurrency
            )
        except RequestFailed as error:
            raise ConfigError(f"lmi replay: sagemaker:{name}: {error} {error.advice}".rstrip()) from None
        self._timeout = timeout
        self._configuration = ""
        self._threads = ThreadPoolExecutor(concurrency, "sagemaker")

    async def open(self) -> None:
        """Find out which configuration the endpoint has, if the caller may describe it."""
        self._configuration = await asyncio.get_running_loop().run_in_executor(self._threads, self._describe)

    def _describe(self) -> str:
        """Return the name of the endpoint's configuration, or "" if it is not known."""
        own = os.environ.get
        if own("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME") and not own("AWS_ENDPOINT_URL"):
            return ""  # the requests go elsewhere than to the account
        client = self._runtime.session.client("sagemaker", region_name=self._runtime.region, config=_SHORTLY)
        with contextlib.suppress(*FROM_AWS):
            described = client.describe_endpoint(EndpointName=self._runtime.endpoint_name)
            return f"configuration {described['EndpointConfigName']}"
        return ""

    async def send(self, request: Request) -> Attempt:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._send, request)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _send(self, request: Request) -> Attempt:
        start = time.monotonic()
        arguments = _arguments(request)
        streams = traits(request).streams
        try:
            response = (self._runtime.stream if streams else self._runtime.invoke)(arguments)
            pieces, arrivals = _read(_parts(response) if streams else iter([response["Body"]]), start + self._timeout)
        except RequestFailed as error:
            return _failed(error)
        except _TooLong as error:
            return Attempt(lost(str(error)))
        times = times_of(start, arrivals, time.monotonic())
        body, content_type = b"".join(pieces), response.get("ContentType", "")
        variant = response.get("InvokedProductionVariant")
        by = ", ".join(filter(None, [self._configuration, f"variant {variant}" if variant else ""]))
        container = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get(EMULATED, "")
        return Attempt(Response(200, content_type, body, "", times, by=by, container=container))


class _TooLong(Exception): ...


def _arguments(request: Request) -> dict[str, Any]:
    """Return boto3's arguments. A path other than /invocations is sent as the attribute `route`, as in AWS's images."""
    arguments: dict[str, Any] = {"Body": request.body}
    headers = {name.lower(): value for name, value in request.headers.items()}
    if request.path.partition("?")[0] not in ("/invocations", "/") and "route=" not in headers.get(ATTRIBUTES, ""):
        parts = [part for part in (headers.get(ATTRIBUTES), f"route={request.path}") if part]
        headers[ATTRIBUTES] = ";".join(parts)
    for name, argument in _ARGUMENTS.items():
        if name in headers:
            arguments[argument] = headers[name]
    return arguments


def _parts(response: Mapping[str, Any]) -> Iterator[bytes]:
    stream = response["Body"]
    try:
        for event in stream:
            yield event.get("PayloadPart", {}).get("Bytes", b"")
    except FROM_AWS as error:
        raise failure(error) from error
    finally:
        with contextlib.suppress(Exception):  # the connection may be broken
            stream.close()


def _read(parts: Iterator[bytes], until: float) -> tuple[list[bytes], list[float]]:
    """Read a body until the time `until`, because boto3 limits only the time between parts."""
    pieces: list[bytes] = []
    arrivals: list[float] = []
    size = 0
    for part in parts:
        now = time.monotonic()
        if now > until:
            raise _TooLong("timeout")
        if (size := size + len(part)) > BodyReader.max_bytes:
            raise _TooLong(f"over {BodyReader.max_bytes >> 20} MiB")
        pieces.append(part)
        arrivals.append(now)
    return pieces, arrivals


def _failed(error: RequestFailed) -> Attempt:
    """Return the error response of the container, or a lost response if the container sent none."""
    cause = getattr(error.__cause__, "response", None)
    if error.original_status and isinstance(cause, Mapping) and cause.get("OriginalMessage"):
        response = Response(error.original_status, "", str(cause["OriginalMessage"]).encode())
        return Attempt(response, isinstance(error, ModelBusy))
    busy = isinstance(error, NotStarted) and not isinstance(error, Unreachable)
    return Attempt(lost(f"SageMaker: {type(error).__name__}"), busy)
