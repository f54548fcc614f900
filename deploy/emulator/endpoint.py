"""The state of the emulated endpoint, its admission checks and its data capture."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import random
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from types import MappingProxyType
from typing import Any

from deploy.emulator.protocol import CUSTOM_ATTRIBUTES, EMULATED, INFERENCE_ID, ApiError, validation_error

# -- data capture: an endpoint's requests and responses in JSON Lines files, as SageMaker writes them to S3 ------------
# AWS does not document what it captures of streams and of failed requests. Here, a stream's endpointOutput contains its
# bytes, and a failed request has no endpointOutput.

log = logging.getLogger("deploy.emulator")

_SECONDS = 1.0  # maximum time until a captured event is written
_MOST_BYTES = 8 << 20  # maximum size of the events that are not written yet
_SAMPLED = 100.0  # percent

Output = tuple[str, bytes]
"""Content type and body of a response."""


@dataclass(frozen=True)
class ShadowVariant:
    """A shadow variant.

    Attributes:
        variant: name of the variant.
        share: fraction of the requests that are copied to the variant, 0 to 1.
    """

    variant: str
    share: float


@dataclass(frozen=True)
class DataCapture:
    """An endpoint's DataCaptureConfig and its shadow variant, whose responses are also captured.

    Args:
        destination: the S3 prefix of the captured files.
        write: function that writes an object, given its URI and content. It is called in a thread.
        percent: percentage of the requests to capture.
        inputs: whether requests are captured.
        outputs: whether responses are captured.
        json_types: content types that are captured as JSON text. Types in neither set are captured as base64.
        csv_types: content types that are captured as CSV text.
    """

    destination: str
    write: Callable[[str, bytes], None]
    percent: float = _SAMPLED
    inputs: bool = True
    outputs: bool = True
    json_types: frozenset[str] = frozenset()
    csv_types: frozenset[str] = frozenset()
    shadow: ShadowVariant | None = None

    @classmethod
    def of(
        cls, config: Mapping[str, Any], write: Callable[[str, bytes], None], shadow: ShadowVariant | None
    ) -> DataCapture:
        """Return the data capture that a DataCaptureConfig describes."""
        modes = {option["CaptureMode"] for option in config["CaptureOptions"]}
        types = config.get("CaptureContentTypeHeader", {})
        return cls(
            config["DestinationS3Uri"].rstrip("/"),
            write,
            config["InitialSamplingPercentage"],
            bool(modes & {"Input", "InputAndOutput"}),
            bool(modes & {"Output", "InputAndOutput"}),
            frozenset(map(str.lower, types.get("JsonContentTypes", ()))),
            frozenset(map(str.lower, types.get("CsvContentTypes", ()))),
            shadow,
        )


@dataclass(frozen=True)
class CapturedRequest:
    """A captured request.

    Args:
        container: the name of the container if it is shared (see `Endpoint.shared_container`).
    """

    capture: DataCapture
    headers: Mapping[str, str]
    body: bytes
    container: Mapping[str, str] = field(default_factory=dict)
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    time: datetime = field(default_factory=lambda: datetime.now(timezone.utc))

    @property
    def is_shadowed(self) -> bool:
        """Return whether to copy the request to the shadow variant. The result is random, so read it only once."""
        shadow = self.capture.shadow
        return shadow is not None and random.random() < shadow.share

    def line(self, output: Output | None) -> bytes:
        capture, data = self.capture, dict[str, dict[str, str]]()
        if capture.inputs:
            data["endpointInput"] = self._part("INPUT", self.headers.get("Content-Type", ""), self.body)
        if capture.outputs and output is not None:
            data["endpointOutput"] = self._part("OUTPUT", *output)
        about: dict[str, Any] = {"eventId": self.id, **self.container}
        if INFERENCE_ID in self.headers:
            about["inferenceId"] = self.headers[INFERENCE_ID]
        if CUSTOM_ATTRIBUTES in self.headers:
            about["customAttributes"] = [self.headers[CUSTOM_ATTRIBUTES]]
        about["inferenceTime"] = self.time.strftime("%Y-%m-%dT%H:%M:%SZ")
        line = {"captureData": data, "eventMetadata": about, "eventVersion": "0"}
        return json.dumps(line, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"

    def _part(self, mode: str, content_type: str, body: bytes) -> dict[str, str]:
        media = content_type.partition(";")[0].strip().lower()
        types = {"JSON": self.capture.json_types, "CSV": self.capture.csv_types}
        encoding = next((name for name, media_types in types.items() if media in media_types), "BASE64")
        try:
            data = base64.b64encode(body).decode() if encoding == "BASE64" else body.decode()
        except UnicodeDecodeError:
            encoding, data = "BASE64", base64.b64encode(body).decode()
        return {"observedContentType": content_type, "mode": mode, "data": data, "encoding": encoding}


class Captures:
    """A collector that writes the captured events of an endpoint to files."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._waiting: dict[tuple[DataCapture, str, str], list[bytes]] = {}
        self._bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @staticmethod
    def begin(
        capture: DataCapture | None,
        headers: Mapping[str, str],
        body: bytes,
        container: Mapping[str, str] = MappingProxyType({}),
    ) -> CapturedRequest | None:
        """Return the event for a request, or None if the request is not captured.

        Args:
            headers: request headers that the container receives.
            container: the name of the container if it is shared.
        """
        if capture is None or random.random() * _SAMPLED >= capture.percent:
            return None
        return CapturedRequest(capture, headers, body, container)

    def end(self, event: CapturedRequest | None, variant: str, output: Output | None) -> None:
        """Record a captured event with the response of a variant, or with None if the request failed."""
        if event is None:
            return
        line = event.line(output)
        if b'"captureData":{}' in line[:20]:  # only outputs are captured, and the request failed
            return
        key = (event.capture, variant, event.time.strftime("%Y/%m/%d/%H"))
        self._waiting.setdefault(key, []).append(line)
        self._bytes += len(line)
        if self._bytes > _MOST_BYTES:
            self._flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_SECONDS, self._flush)

    def copy(self, event: CapturedRequest | None, ask: Callable[[], Awaitable[Output]]) -> None:
        """Send a copy of the request to the shadow variant in the background, if it is in the variant's share.

        Args:
            event: the captured request. A request that is not captured (None) is not copied.
            ask: function that sends the request to the container and returns the response.
        """
        if event is not None and event.is_shadowed:
            self._run(self._copied(event, ask))

    async def close(self) -> None:
        """Write pending events. Requests to the shadow variant that are still running after a second are cancelled."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._flush()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _copied(self, event: CapturedRequest, ask: Callable[[], Awaitable[Output]]) -> None:
        assert event.capture.shadow is not None, "the event is shadowed"
        output = None
        try:
            output = await ask()
        except Exception as error:  # a failing shadow variant does not affect the response to the client
            log.warning("the shadow variant did not respond: %s", error or type(error).__name__)
        self.end(event, event.capture.shadow.variant, output)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        waiting, self._waiting, self._bytes, self._timer = self._waiting, {}, 0, None
        for (capture, variant, hour), lines in waiting.items():
            name = f"{datetime.now(timezone.utc):%M-%S}-{random.randrange(1000):03}-{uuid.uuid4()}.jsonl"
            uri = f"{capture.destination}/{self._endpoint}/{variant}/{hour}/{name}"
            self._run(self._write(capture, uri, b"".join(lines)))

    async def _write(self, capture: DataCapture, uri: str, content: bytes) -> None:
        try:
            await asyncio.to_thread(capture.write, uri, content)
        except Exception as error:  # a failed capture does not affect the response to the client
            log.warning("captured data could not be written to %s: %s", uri, error)

    def _run(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


MIB = 2**20
ACCOUNT = "000000000000"


class Status(Enum):
    """State of an endpoint, or of a component's own container."""

    CREATING = "Creating"
    FAILED = "Failed"
    IN_SERVICE = "InService"
    UNHEALTHY = "Unhealthy"
    """In service, but the container does not pass its health checks."""
    EXITED = "Exited"
    """In service, but the container has exited."""

    @property
    def is_in_service(self) -> bool:
        """Return whether SageMaker would report the endpoint as InService."""
        return self not in (Status.CREATING, Status.FAILED)

    @property
    def is_healthy(self) -> bool:
        return self not in (Status.UNHEALTHY, Status.EXITED)


@dataclass(frozen=True)
class Limits:
    """SageMaker's limits: timeouts in seconds, sizes in bytes."""

    invoke: float = 60.0
    stream: float = 480.0
    body: int = 25 * MIB
    small_body: int = 6 * MIB
    """Maximum size of a request body according to the API model. Larger bodies cause a warning in the log."""
    inline_body: int = 128_000
    """Maximum size of the inline body of an asynchronous request."""
    asynchronous: float = 900.0
    """Default of InvocationTimeoutSeconds."""


@dataclass
class EndpointComponent:
    """An inference component.

    Args:
        adapter: name of the adapter in the container, or None if the component is not an adapter.
        copies: number of copies. If 0, requests fail for lack of capacity.
        container: the URL of the component's own container, or None if the endpoint's container serves the component.
        base: name of the base component whose container serves the adapter, or None if the component is not an
            adapter or the endpoint's container serves it.
        status: state of the component's own container, which its health checks update.
    """

    adapter: str | None = None
    copies: int = 1
    container: str | None = None
    base: str | None = None
    status: Status = Status.IN_SERVICE


@dataclass
class Endpoint:
    """One endpoint. Health checks update `status` while the endpoint is served.

    Args:
        container: the URL of the container, without a path.
        region: region for which requests must be signed, or None to accept any region.
        components: inference components by name. If empty, the endpoint serves a model itself, and rejects
            InferenceComponentName.
        part_bytes: maximum size of the parts of a stream in bytes, for testing clients, or None to keep the parts
            as the container sends them.
        capture: data capture, or None if it is off.
        weights: maps the name of each production variant to its weight. The container serves all variants.
        asynchronous: whether the endpoint has an AsyncInferenceConfig, so that it accepts only asynchronous requests.
        is_shared: whether the container also serves other endpoints. Responses and captured data then name it.
    """

    container: str
    name: str = "local"
    region: str | None = None
    components: Mapping[str, EndpointComponent] = field(default_factory=dict)
    limits: Limits = Limits()
    part_bytes: int | None = None
    status: Status = Status.IN_SERVICE
    account: str = ACCOUNT
    capture: DataCapture | None = None
    weights: Mapping[str, float] = field(default_factory=lambda: {"AllTraffic": 1.0})
    asynchronous: bool = False
    is_shared: bool = False

    @property
    def variant(self) -> str:
        """Return the name of the first variant."""
        return next(iter(self.weights))

    def admit(self, name: str, variant: str | None) -> str:
        """Return the variant that serves a request: the requested variant, or else a random variant by weight.

        Raises:
            ApiError: the name or the variant is unknown, no variant has a weight, or the endpoint is not in service,
                not healthy, or asynchronous.
        """
        weights = self.weights
        if name != self.name:
            raise validation_error(f"Endpoint {name} of account {self.account} not found.")
        if not self.status.is_in_service:
            raise validation_error(
                f"Endpoint {name} of account {self.account} not found (its status is {self.status.value})."
            )
        if self.asynchronous:
            raise validation_error(f"Endpoint {name} is asynchronous: only InvokeEndpointAsync is supported.")
        if variant is not None and variant not in weights:
            raise validation_error(f"Variant {variant} of endpoint {name} not found: it has {', '.join(weights)}.")
        if not self.status.is_healthy:
            raise ApiError(503, "ServiceUnavailable", f"No instance of endpoint {name} passes its health check.")
        if variant is None and not any(weights.values()):
            raise validation_error(f"No variant of endpoint {name} has a weight; choose a variant with TargetVariant.")
        return variant or random.choices(list(weights), list(weights.values()))[0]

    def component(self, component: str | None) -> EndpointComponent | None:
        """Return the requested component, or None if the endpoint has no components.

        Raises:
            ApiError: the component name is missing, unknown or not allowed, or the component has no healthy copy.
        """
        if not self.components:
            if component is not None:
                raise validation_error(
                    f"Inference Component Name header is not allowed: endpoint {self.name} has no inference components."
                )
            return None
        if component is None:
            raise validation_error(
                "Inference Component Name header is required for endpoints to which you plan to deploy inference "
                f"components. Endpoint {self.name} has: {', '.join(self.components)}."
            )
        target = self.components.get(component)
        if target is None:
            raise validation_error(f"Inference Component {component} of endpoint {self.name} not found.")
        if not target.copies:
            raise validation_error(
                "Inference Component has no capacity to process this request. ApplicationAutoScaling may be in "
                "progress (if configured), or its copy count must be raised."
            )
        base = target if target.base is None else self.components[target.base]
        if not base.status.is_healthy:
            raise ApiError(
                503, "ServiceUnavailable", f"No copy of Inference Component {component} passes its health check."
            )
        return target

    def shared_container(self, component: EndpointComponent) -> dict[str, str]:
        """Return the header that names a container which also serves other endpoints, or {}. An adapter is part of it.

        `lmi replay` refuses to compare two endpoints that have the same container.
        """
        if not self.is_shared:
            return {}
        adapter = f"#{component.adapter}" if component.adapter else ""
        return {EMULATED: f"{component.container or self.container}{adapter}"}

    def log_stream(self, region: str, component: str | None = None, variant: str | None = None) -> str:
        """Return the ARN of the log stream: the component's if it has its own container, otherwise the variant's."""
        target = self.components.get(component) if component is not None else None
        group = f"/aws/sagemaker/Endpoints/{self.name}"
        if target is not None and target.container is not None:
            group = f"/aws/sagemaker/InferenceComponents/{target.base or component}"
        return f"arn:aws:logs:{region}:{self.account}:log-group:{group}:log-stream:{variant or self.variant}/local"
