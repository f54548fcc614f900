"""SageMaker Runtime of the emulated account: a `Runtime` for each endpoint, all in front of the same container."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import http.client
import json
import os
import re
import socket
import threading
import time
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.error import HTTPError

from botocore.exceptions import ClientError
from multidict import CIMultiDict
from werkzeug.datastructures import EnvironHeaders

from deploy.emulator.authorization import Permission, RoleStore, Where, needs_of_action
from deploy.emulator.cloud import Call, Cloud, body_of, refuse
from deploy.emulator.endpoint import DataCapture, Endpoint, EndpointComponent, Limits, ShadowVariant, Status
from deploy.emulator.protocol import ASYNC, INFERENCE_ID, to_container
from deploy.emulator.relay import reset_when_closed
from deploy.emulator.sagemaker import ACCOUNT, Invalid, Thing, now, specifications_of, weights_of
from deploy.emulator.serving import listening
from handler.core.numbers import is_digits

# -- InvokeEndpointAsync: SageMaker accepts the request, and executes it later with the model's role -------------------
# The role needs permissions to read the request, to write the response and to publish to the SNS topics.

_HEADER = "X-Amzn-SageMaker-"
_INPUT = f"{_HEADER}InputLocation"
_FILENAME = re.compile(r"(?!.*\..*\.)[a-zA-Z0-9][a-zA-Z0-9_.-]{0,31}")
_EXTENSION = re.compile(r"(?!s3:|https:)[a-zA-Z0-9!_.*'()/-]{1,512}")


@dataclass(frozen=True)
class Accepted:
    """An accepted asynchronous request.

    Attributes:
        store: access to S3 with the permissions of the model's role.
        endpoint: name of the endpoint.
        content_type: content type of the request.
        id: the InferenceId of the request.
        body: inline body, or empty if `location` is not None.
        location: the S3 URI of the request body (InputLocation), or None if the body is inline.
        topics: maps SuccessTopic and ErrorTopic to the ARNs of the SNS topics to notify.
        output: the S3 URI to which the response is written.
        failure: the S3 URI to which the reason for a failure is written.
        ttl: maximum time in the queue, in seconds (RequestTTLSeconds).
        timeout: timeout for the container's response, in seconds (InvocationTimeoutSeconds).
        waits: whether the request is never executed, because the endpoint has no instance and no policy adds one.
        since: time of acceptance, on the monotonic clock.
        received: time of acceptance.
    """

    store: RoleStore
    endpoint: str
    content_type: str
    id: str
    body: bytes
    location: str | None
    topics: dict[str, str]
    output: str
    failure: str
    ttl: int
    timeout: int
    waits: bool = False
    since: float = field(default_factory=time.monotonic)
    received: datetime.datetime = field(default_factory=now)

    def respond(self, start_response: Any) -> list[bytes]:
        headers = {f"{_HEADER}OutputLocation": self.output, f"{_HEADER}FailureLocation": self.failure}
        start_response("202 Accepted", [("Content-Type", "application/json"), *headers.items()])
        return [json.dumps({"InferenceId": self.id}).encode()]

    def work(self, ask: Callable[[bytes], bytes]) -> None:
        """Execute the request, and write its response or failure to S3.

        Args:
            ask: function that sends a request body to the container and returns the response body. It raises
                ValueError with the reason if the container fails.
        """
        if self.waits:
            return
        failure = self._execute(ask)
        if failure:
            with contextlib.suppress(PermissionError, ClientError):
                self.store.write(self.failure, failure.encode(), ContentType="application/json")
        topic = self.topics.get("ErrorTopic" if failure else "SuccessTopic")
        with contextlib.suppress(PermissionError, ClientError):
            if topic is not None:
                self.store.check(*self._telling(topic))
                self._sns.publish(TopicArn=topic, Message=json.dumps(self._notification(failure)))

    def _notification(self, failure: str) -> dict[str, Any]:
        """Return the message that SageMaker publishes about the end of a request.

        Args:
            failure: reason for the failure, or empty if the request succeeded.
        """
        location = {} if self.location is None else {"inputLocation": self.location}
        outcome: dict[str, Any] = {"failureReason": failure}
        if not failure:
            outcome = {"responseParameters": {"contentType": "application/json", "outputLocation": self.output}}
        return {
            "awsRegion": self.store.where.region,
            "eventTime": _stamp(now()),
            "receivedTime": _stamp(self.received),
            "invocationStatus": "Failed" if failure else "Completed",
            "requestParameters": {"contentType": self.content_type, "endpointName": self.endpoint, **location},
            **outcome,
            "inferenceId": self.id,
            "eventVersion": "1.0",
            "eventSource": "aws:sagemaker",
            "eventName": "InferenceResult",
        }

    def _execute(self, ask: Callable[[bytes], bytes]) -> str:
        """Write the container's response to S3. Return the reason if that failed, or an empty string."""
        if time.monotonic() - self.since > self.ttl:
            return f"The request expired: it waited for more than {self.ttl} s."
        try:
            body = self.body if self.location is None else self.store.read(self.location)
            self.store.check(*self.store.writing(self.output))
            self.store.write(self.output, ask(body), ContentType="application/json")
        except (PermissionError, ValueError) as error:
            return str(error)
        except ClientError as error:  # the request's object, or the bucket of the response, does not exist
            return f"Unable to read {self.location} or to write {self.output}: {error}"
        return ""

    def _telling(self, topic: str) -> Iterator[Permission]:
        where = self.store.where
        yield from needs_of_action("sns:Publish", {"TopicArn": topic}, where)
        attributes = self._sns.get_topic_attributes(TopicArn=topic)["Attributes"]
        if key := attributes.get("KmsMasterKeyId"):
            via = {"kms:ViaService": f"sns.{where.region}.{where.suffix}"}
            for action in ("kms:GenerateDataKey", "kms:Decrypt"):
                yield from needs_of_action(action, {"KeyId": key}, where, **via)

    @property
    def _sns(self) -> Any:
        return self.store.cloud.client("sns", self.store.where.region)


def accept(
    cloud: Cloud, endpoint: str, region: str, body: bytes, headers: Mapping[str, str], limits: Limits
) -> Accepted:
    """Accept an asynchronous request.

    Raises:
        Invalid: the request violates the API's rules, or the endpoint does not exist, is not in service or has no
            AsyncInferenceConfig.
    """
    _check_input(headers, body, limits)
    number = str(uuid.uuid4())
    names = _object_names(headers, number)
    ttl = _number(headers, "RequestTTLSeconds", 60, 21600, 21600)
    timeout = _number(headers, "InvocationTimeoutSeconds", 1, 3600, int(limits.asynchronous))
    thing = cloud.sagemaker.get("endpoint", endpoint)
    if thing.status != "InService":
        raise Invalid(f"Endpoint {endpoint} is not in service.")
    config = thing.served.config
    if "AsyncInferenceConfig" not in config:
        raise Invalid(f"Endpoint {endpoint} does not support asynchronous inference: it has no AsyncInferenceConfig.")
    model = thing.served.models[config["ProductionVariants"][0]["ModelName"]]
    outputs = config["AsyncInferenceConfig"]["OutputConfig"]
    if not _has_instances(thing):
        cloud.scaling.wake(endpoint, region)
    return Accepted(
        store=RoleStore(cloud, model["ExecutionRoleArn"], Where(region, ACCOUNT), outputs.get("KmsKeyId")),
        endpoint=endpoint,
        content_type=headers.get("Content-Type", ""),
        id=headers.get(INFERENCE_ID) or number,
        body=body,
        location=headers.get(_INPUT),
        topics=outputs.get("NotificationConfig", {}),
        output=f"{outputs['S3OutputPath'].rstrip('/')}/{names[0]}",
        failure=f"{outputs.get('S3FailurePath', outputs['S3OutputPath']).rstrip('/')}/{names[1]}",
        ttl=ttl,
        timeout=timeout,
        waits=not _has_instances(thing),
    )


def _stamp(at: datetime.datetime) -> str:
    """Return a time as in SageMaker's notifications, such as `2026-11-28T16:00:00.123Z`."""
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03d}Z"


def _check_input(headers: Mapping[str, str], body: bytes, limits: Limits) -> None:
    location = headers.get(_INPUT)
    if (location is None) == (not body):
        raise Invalid("Exactly one of InputLocation and Body must be given.")
    if location is not None and not re.fullmatch("s3://[^/]+/.+", location):
        raise Invalid(f"InputLocation {location} must be s3://bucket/key.")
    if len(body) > limits.inline_body:
        raise Invalid(f"Body has {len(body)} bytes, but an inline body must have at most {limits.inline_body} bytes.")


def _object_names(headers: Mapping[str, str], number: str) -> tuple[str, str]:
    """Return the names of the objects for the response and for a failure, relative to the endpoint's prefixes."""
    folder = _text(headers, "S3OutputPathExtension", _EXTENSION).strip("/")
    prefix, name = f"{folder}/" if folder else "", _text(headers, "Filename", _FILENAME)
    return f"{prefix}{name or f'{number}.out'}", f"{prefix}{name or f'{number}-error.out'}"


def _text(headers: Mapping[str, str], name: str, pattern: re.Pattern[str]) -> str:
    value = headers.get(_HEADER + name)
    if value is not None and not pattern.fullmatch(value):
        raise Invalid(f"{name} {value!r} must match {pattern.pattern}.")
    return value or ""


def _number(headers: Mapping[str, str], name: str, minimum: int, maximum: int, default: int) -> int:
    text = headers.get(_HEADER + name)
    if text is None:
        return default
    if not (is_digits(text) and len(text) < 9) or not minimum <= int(text) <= maximum:
        raise Invalid(f"{name} {text!r} must be a number from {minimum} to {maximum}.")
    return int(text)


def _has_instances(endpoint: Thing) -> bool:
    return any(endpoint.request.get("Counts", {"all": 1}).values())


# -- data capture, which is written to the emulated S3 with the model's role -------------------------------------------


def configured(cloud: Cloud, endpoint: Thing, region: str) -> DataCapture | None:
    """Return the data capture of an endpoint's configuration, or None if it is off."""
    request = endpoint.served.config
    capture = request.get("DataCaptureConfig")
    if capture is None or not capture.get("EnableCapture", True):
        return None
    variant = request["ProductionVariants"][0]
    role = request.get("ExecutionRoleArn")
    if role is None and "ModelName" in variant:
        role = endpoint.served.models[variant["ModelName"]]["ExecutionRoleArn"]
    shadow = None
    for item in request.get("ShadowProductionVariants", ()):
        shadow = ShadowVariant(
            item["VariantName"], item.get("InitialVariantWeight", 1) / variant.get("InitialVariantWeight", 1)
        )
    store = RoleStore(cloud, role or "", Where(region, ACCOUNT), capture.get("KmsKeyId"))
    return DataCapture.of(capture, store.write, shadow)


_CONCURRENT = 4  # concurrent asynchronous requests; SageMaker's default of MaxConcurrentInvocationsPerInstance
_PIECE = 2**16  # maximum size of a response body to pass on at once, in bytes
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "date", "server"}
_NOT_PASSED = {"host", "content-length", *_HOP_BY_HOP}
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # without the environment's proxies
_STATUS = {"Creating": Status.CREATING, "Failed": Status.FAILED}


class Runtimes:
    """The emulators of all endpoints of the account, each started on the first request to its endpoint.

    Args:
        plan: template for all endpoints, with their container, its state, and the limits.
        loop: event loop that runs the emulators. The methods are called from other threads.
    """

    def __init__(self, plan: Endpoint, loop: asyncio.AbstractEventLoop) -> None:
        self._plan, self._loop = plan, loop
        self._running: dict[str, tuple[Endpoint, str]] = {}
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        self._workers = ThreadPoolExecutor(_CONCURRENT)

    async def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._stop.set()
        await asyncio.gather(*self._tasks)

    def invoked(self, cloud: Cloud, call: Call, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Respond to a request to SageMaker Runtime."""
        name, _, route = environ["PATH_INFO"].removeprefix("/endpoints/").partition("/")
        try:
            thing = cloud.sagemaker.look("endpoint", name)
            if route == "async-invocations":
                return self._accept(cloud, name, call.region, environ, start_response)
        except Invalid as error:
            missing = ("endpoint", name) not in cloud.sagemaker.things
            text = f"Endpoint {name} of account {ACCOUNT} not found." if missing else error.message
            return refuse("ValidationError", text, start_response)
        return relayed(self._emulator(cloud, thing, call.region), environ, start_response)

    def _accept(
        self, cloud: Cloud, name: str, region: str, environ: dict[str, Any], start_response: Any
    ) -> list[bytes]:
        """Accept an asynchronous request, and execute it in the background."""
        headers = CIMultiDict(_headers(environ))
        accepted = accept(cloud, name, region, body_of(environ), headers, self._plan.limits)
        passed = {**to_container(headers, ASYNC, None), INFERENCE_ID: accepted.id}
        self._workers.submit(accepted.work, lambda body: self._ask(body, passed, accepted.timeout))
        return accepted.respond(start_response)

    def transform(self, payload: bytes, content_type: str) -> bytes:
        """Return the body of the container's response to a transform job's payload, which may also be a 4xx response.

        Raises:
            ValueError: the response status is 5xx, or the container did not respond.
        """
        headers = {"Content-Type": content_type} if content_type else {}
        status, response_body = self._post(payload, headers, self._plan.limits.asynchronous)
        if status >= 500:
            raise ValueError(f"Bad HTTP status received from algorithm: {status}")
        return response_body

    def _ask(self, body: bytes, headers: Mapping[str, str], seconds: float) -> bytes:
        """Return the body of the container's response to an asynchronous request.

        Raises:
            ValueError: the response status is 4xx or 5xx, or the container did not respond.
        """
        status, response_body = self._post(body, headers, seconds)
        if status >= 400:
            text = response_body.decode("utf-8", "replace")
            raise ValueError(f'Received client error ({status}) from primary with message "{text}".')
        return response_body

    def _post(self, body: bytes, headers: Mapping[str, str], seconds: float) -> tuple[int, bytes]:
        request = urllib.request.Request(f"{self._plan.container}/invocations", body, dict(headers))
        try:
            try:
                reply = _OPENER.open(request, timeout=seconds)
            except HTTPError as error:
                reply = error
            with reply:
                return int(reply.status), bytes(reply.read())
        except OSError as error:
            raise ValueError(f"The container did not respond: {error}") from None

    def _emulator(self, cloud: Cloud, thing: Thing, region: str) -> str:
        """Start an endpoint's emulator if needed, update its state, and return its URL."""
        with self._lock:
            if thing.name not in self._running:
                started = asyncio.run_coroutine_threadsafe(self._start(thing.name), self._loop)
                self._running[thing.name] = started.result()
        endpoint, url = self._running[thing.name]
        healthy = Status.IN_SERVICE if self._plan.status.is_healthy else Status.UNHEALTHY
        endpoint.status = _STATUS.get(thing.status, healthy)
        sagemaker = cloud.sagemaker
        endpoint.capture = configured(cloud, thing, region)
        endpoint.weights = weights_of(thing.served.config, thing.request)
        endpoint.asynchronous = "AsyncInferenceConfig" in thing.served.config
        endpoint.components = {item.name: _component(item) for item in sagemaker.components_of(thing.name)}
        return url

    async def _start(self, name: str) -> tuple[Endpoint, str]:
        endpoint = replace(self._plan, name=name, account=ACCOUNT, is_shared=True)
        started: asyncio.Future[str] = self._loop.create_future()

        async def serve() -> None:
            async with listening(endpoint, "127.0.0.1", 0) as url:
                started.set_result(url)
                await self._stop.wait()

        self._tasks.add(asyncio.ensure_future(serve()))
        return endpoint, await started


def relayed(url: str, environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
    """Relay a request to an emulator, and return the pieces of its response as they arrive."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc)
    path = urllib.parse.quote(environ["PATH_INFO"].encode("latin-1"))
    query = f"?{environ['QUERY_STRING']}" if environ["QUERY_STRING"] else ""
    try:
        connection.request("POST", path + query, body_of(environ), _headers(environ))
        reply = connection.getresponse()
    except BaseException:
        connection.close()
        raise
    headers = [(name, value) for name, value in reply.getheaders() if name.lower() not in _HOP_BY_HOP]
    start_response(f"{reply.status} {reply.reason}", headers)
    return _pieces(connection, reply, environ["werkzeug.socket"])


def _pieces(
    connection: http.client.HTTPConnection, reply: http.client.HTTPResponse, client: socket.socket
) -> Iterator[bytes]:
    """Yield the pieces of a response as they arrive.

    If the client disconnects, the generator is closed, and with it the connection to the emulator. If the response
    is cut off, the client's connection is reset, because an ordinary close would indicate a complete response.
    """
    try:
        while data := reply.read1(_PIECE):
            yield data
    except (OSError, http.client.HTTPException):
        reset_when_closed(client)
        os.close(client.detach())  # close now: moto's server would close the connection without a reset
    finally:
        connection.close()


def _component(thing: Thing) -> EndpointComponent:
    """Return the emulator's component for a component resource. It has copies only if it is in service or updating."""
    copies = thing.request["RuntimeConfig"]["CurrentCopyCount"] if thing.status in ("InService", "Updating") else 0
    is_adapter = any("BaseInferenceComponentName" in item for item in specifications_of(thing.request))
    return EndpointComponent(thing.name if is_adapter else None, copies)


def _headers(environ: dict[str, Any]) -> dict[str, str]:
    """Return the request headers to pass on to the emulator."""
    return {name: value for name, value in EnvironHeaders(environ) if name.lower() not in _NOT_PASSED}
