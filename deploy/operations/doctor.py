"""Measurements of SageMaker behaviour that AWS does not document, made through the public API on a live endpoint.

`lmi deploy doctor NAME --live` runs them. Each returns one `Measurement`, even if it fails. A measurement describes
SageMaker, and does not judge the endpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from deploy.aws import error_code, error_message

MIB = 2**20
SIZES = (6 * MIB - 1024, 6 * MIB + 1, 20 * MIB)
"""Sizes of request bodies in bytes: below and above the API model's limit (6,291,456), and below the FAQ's 25 MB."""

OPEN = (
    "whether traffic stops before SIGTERM (only visible in the container's log while it is replaced)",
    "what SAGEMAKER_ENABLE_LOAD_AWARE does, and whether a custom container can use KV_AWARE routing",
    "which calls the container gets when an adapter component is updated (see `lmi deploy logs NAME`)",
)
"""Open questions that cannot be answered through the public API."""

_FAILURES = (ClientError, BotoCoreError, HTTPError)


Result = tuple[str, Mapping[str, Any]]
"""What was measured, as text and in machine-readable form."""


@dataclass(frozen=True)
class Measurement:
    """The result of one measurement.

    Attributes:
        question: what was measured.
        answer: the result as text, or the error if the measurement failed.
        figures: the result in machine-readable form, or None if the measurement failed or was not possible.
    """

    question: str
    answer: str
    figures: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Target:
    """An endpoint to measure. Its container must accept requests in LMI's schema.

    Attributes:
        client: boto3's client for SageMaker Runtime.
        endpoint: name of the endpoint.
        component: name of the inference component to send requests to, or None for an endpoint without components.
    """

    client: Any
    endpoint: str
    component: str | None = None

    def invoke(self, body: Mapping[str, Any] | bytes, **more: Any) -> Any:
        return self.client.invoke_endpoint(**self._arguments(body), **more)

    def stream(self, body: Mapping[str, Any], **more: Any) -> Any:
        return self.client.invoke_endpoint_with_response_stream(**self._arguments({**body, "stream": True}), **more)

    def _arguments(self, body: Mapping[str, Any] | bytes) -> dict[str, Any]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        header = {} if self.component is None else {"InferenceComponentName": self.component}
        return {"EndpointName": self.endpoint, "Body": content, "ContentType": "application/json", **header}


def measure(
    target: Target, *, tokens: int = 64, slow: int = 0, clock: Callable[[], float] = time.monotonic
) -> Iterator[Measurement]:
    """Run the measurements, and yield each result.

    Args:
        tokens: number of tokens to request from streams.
        slow: number of tokens that take more than a minute to generate, to measure the timeouts, or 0 not to do so.
        clock: function that returns the time in seconds.
    """
    yield _measure("a whole response", lambda: _plain(target, clock))
    yield _measure("the Accept header of a non-streaming request", lambda: _accept_plain(target))
    yield _measure("the Accept header of a streaming request", lambda: _accept_stream(target))
    yield _measure("PayloadParts of a stream", lambda: _parts(target, tokens, clock))
    yield _measure("response headers", lambda: _headers(target))
    yield _measure("a session", lambda: _session(target))
    for size in SIZES:
        yield _measure(f"a request body of {size / MIB:.2f} MiB", lambda size=size: _size(target, size))  # type: ignore[misc]
    if slow:
        yield _measure("a response longer than the timeout", lambda: _slow(target, slow, clock))
        yield _measure("a stream longer than a minute", lambda: _parts(target, slow, clock))
    for point in OPEN:
        yield Measurement(point, "cannot be measured through the public API")


def report(endpoint: str, findings: Sequence[Measurement]) -> dict[str, Any]:
    return {"endpoint": endpoint, "findings": [asdict(finding) for finding in findings]}


def _measure(question: str, measurement: Callable[[], Result]) -> Measurement:
    try:
        result, figures = measurement()
    except _FAILURES as error:
        return Measurement(question, _failure_text(error))
    return Measurement(question, result, figures)


def _failure_text(error: Exception) -> str:
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        inner = error.response.get("OriginalStatusCode")
        text = error_message(error)[:200]
        from_container = "" if inner is None else f", the container's status {inner}"
        return f"{error_code(error)} (status {status}{from_container}): {text}"
    return f"{type(error).__name__}: {error}"


def _prompt(tokens: int, **parameters: Any) -> dict[str, Any]:
    return {"inputs": "Count from one to one hundred:", "parameters": {"max_new_tokens": tokens, **parameters}}


def _plain(target: Target, clock: Callable[[], float]) -> Result:
    began = clock()
    response = target.invoke(_prompt(1))
    size = len(response["Body"].read())
    took = clock() - began
    return f"{size} bytes of {response['ContentType']} after {took:.2f} s", {"seconds": took, "bytes": size}


def _accept_plain(target: Target) -> Result:
    return _compare(
        lambda accept: str(target.invoke(_prompt(1), Accept=accept)["ContentType"]),
        ("application/json", "application/jsonlines"),
    )


def _accept_stream(target: Target) -> Result:
    """Measure whether the Accept parameter, sent as X-Amzn-SageMaker-Accept, changes the content type of a stream."""

    def content_type(accept: str) -> str:
        response = target.stream(_prompt(1), Accept=accept)
        for _ in response["Body"]:
            pass
        return str(response["ContentType"])

    return _compare(content_type, ("application/jsonlines", "text/event-stream"))


def _compare(content_type: Callable[[str], str], accepts: tuple[str, str]) -> Result:
    types = {accept: content_type(accept) for accept in accepts}
    text = "; ".join(f"{accept} returns {kind}" for accept, kind in types.items())
    followed = len(set(types.values())) == len(accepts)
    if not followed:
        text += " (inconclusive if the container ignores Accept, as this handler does)"
    return f"{'reaches the container' if followed else 'has no effect'}: {text}", {"content_types": types}


def _parts(target: Target, tokens: int, clock: Callable[[], float]) -> Result:
    began = clock()
    events = target.stream(_prompt(tokens))["Body"]
    parts: list[tuple[float, bytes]] = []
    failure = ""
    try:
        for event in events:
            if "PayloadPart" in event:
                parts.append((clock() - began, event["PayloadPart"]["Bytes"]))
    except _FAILURES as error:
        failure = f"; ended with {_failure_text(error)}"
    if not parts:
        return f"no parts{failure}", {"parts": 0}
    times, sizes = [time for time, _ in parts], [len(content) for _, content in parts]
    whole_lines = sum(content.endswith(b"\n") for _, content in parts)
    gaps = [later - earlier for earlier, later in pairwise(times)] or [0.0]
    figures = {
        "parts": len(sizes),
        "bytes_min": min(sizes),
        "bytes_median": median(sizes),
        "bytes_max": max(sizes),
        "first_after": times[0],
        "last_after": times[-1],
        "gap_median": median(gaps),
        "gap_max": max(gaps),
        "ending_in_a_newline": whole_lines,
    }
    return (
        f"{len(sizes)} parts of {min(sizes)} to {max(sizes)} bytes (median {median(sizes):g}), first after "
        f"{times[0]:.2f} s, last after {times[-1]:.2f} s, {whole_lines} end with a newline{failure}",
        figures,
    )


def _headers(target: Target) -> Result:
    response = target.invoke(_prompt(1), CustomAttributes="doctor=1", InferenceId="doctor-1")
    back = {
        name: value
        for name, value in response["ResponseMetadata"]["HTTPHeaders"].items()
        if name.startswith(("x-amzn-", "x-request", "content-type"))
    }
    return f"{len(back)} headers are returned: {', '.join(sorted(back))}", {"headers": back}


def _session(target: Target) -> Result:
    response = target.invoke({"requestType": "NEW_SESSION"}, SessionId="NEW_SESSION")
    session_id = response.get("NewSessionId")
    if session_id is None:
        return "the container opened no session", {"opened": False}
    target.invoke({"requestType": "CLOSE"}, SessionId=str(session_id).partition(";")[0])
    return f"opened and closed ({session_id})", {"opened": True}


def _size(target: Target, size: int) -> Result:
    """Send a request whose body is padded with spaces to `size` bytes."""
    target.invoke(json.dumps(_prompt(1)).encode().ljust(size))["Body"].read()
    return "accepted", {"bytes": size}


def _slow(target: Target, tokens: int, clock: Callable[[], float]) -> Result:
    began = clock()
    try:
        target.invoke(_prompt(tokens, ignore_eos_token=True))["Body"].read()
    except _FAILURES as error:
        took = clock() - began
        return f"failed after {took:.1f} s: {_failure_text(error)}", {"seconds": took, "answered": False}
    took = clock() - began
    return f"completed after {took:.1f} s (request more tokens to see the limit)", {"seconds": took, "answered": True}
