"""InvokeEndpointWithBidirectionalStream in front of a container, for AWS's unmodified SDK.

The SDK uses HTTP/2 over TLS. SageMaker opens a WebSocket to the container. It passes each event of the client on as one
frame, and each frame of the container as one event.

See https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import json
import logging
import os
import re
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import trustme
from websockets.exceptions import InvalidHandshake
from websockets.frames import CloseCode, Opcode
from websockets.http11 import Response

from deploy.emulator.access import check_host, read_signature
from deploy.emulator.container_socket import ContainerSocket, read_frame, write_event
from deploy.emulator.endpoint import Endpoint
from deploy.emulator.http2 import Http2Connection, tls_context
from deploy.emulator.protocol import VARIANT, ApiError, model_error, validation_error
from deploy.emulator.relay import CONTENT_TYPE, internal_stream_failure, model_stream_error
from deploy.emulator.serving import LocalPlan, Log, cannot_listen, endpoint_front
from deploy.emulator.signed_events import EventReader, EventSignature, decode

log = logging.getLogger("deploy.emulator")

PATH = "invocations-bidirectional-stream"
ACCEPT_SECONDS = 0.25  # maximum seconds for the container to accept the WebSocket; the emulator only warns
OPEN_SECONDS = 10.0
_ERRORS = {"ValidationError": "InputValidationError", "ServiceUnavailable": "ServiceUnavailableError"}
"""Maps the names of errors over HTTP/1.1 to those of this operation."""

_ROUTE = re.compile(rf"/endpoints/([^/]+)/{PATH}")
_MODEL_PATH = re.compile(r"[A-Za-z0-9\-._]+(?:/[A-Za-z0-9\-._]+)*")
_QUERY = re.compile(r"[^=&?\s]+=[^=&?\s]*(?:&[^=&?\s]+=[^=&?\s]*)*")
_AMZN = "x-amzn-sagemaker-"
_SIGNED_EVENTS = "STREAMING-AWS4-HMAC-SHA256-EVENTS"


class Invocation(NamedTuple):
    """A checked request.

    Attributes:
        target: path and query of the container's WebSocket.
        id: id of the request.
        signature: chain of signatures of the events.
    """

    target: str
    id: str
    variant: str
    log_stream: str
    signature: EventSignature


class BidirectionalEmulator:
    """An ASGI application that emulates the operation for one endpoint.

    Args:
        secret: returns the secret key of an access key, or None if it is unknown.
    """

    def __init__(self, endpoint: Endpoint, secret: Callable[[str], str | None]) -> None:
        self._endpoint = endpoint
        self._secret = secret

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        began = time.monotonic()
        try:
            invocation = self._check(scope)
            container = await self._open(invocation)
        except ApiError as error:
            log.info("%s %s: %s", scope["path"], error.code, error)
            return await _send_error(send, error)
        headers = {
            "content-type": CONTENT_TYPE,
            "x-amzn-invoked-production-variant": invocation.variant,
            "x-amzn-requestid": invocation.id,
        }
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _encoded(headers)})
            await _relay(container, invocation.signature, receive, send)
        finally:
            container.abort()
            log.info("%s %.2f s", scope["path"], time.monotonic() - began)

    def _check(self, scope: Mapping[str, Any]) -> Invocation:
        """Check a request.

        Raises:
            ApiError: the request is invalid, or the endpoint cannot serve it.
        """
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        check_host(host, headers.get("origin"), str(scope["server"][0]), headers.get("sec-fetch-site"))
        route = _ROUTE.fullmatch(scope["path"])
        if route is None or scope["method"] != "POST":
            text = f"No operation at {scope['path']}; only InvokeEndpointWithBidirectionalStream uses this port."
            raise ApiError(404, "UnknownOperationException", text)
        signature = read_signature(headers.get("authorization"), self._endpoint.region)
        if headers.get("x-amz-content-sha256") != _SIGNED_EVENTS:
            raise ApiError(403, "IncompleteSignature", f"x-amz-content-sha256 must be {_SIGNED_EVENTS}.")
        variant = self._endpoint.admit(route[1], headers.get(VARIANT.lower()))
        if self._endpoint.components:
            text = "has inference components, but this operation has no InferenceComponentName."
            raise validation_error(f"Endpoint {route[1]} {text}")
        return Invocation(
            _target(headers),
            str(uuid.uuid4()),
            variant,
            self._endpoint.log_stream(signature.region, None, variant),
            EventSignature(signature, self._secret(signature.key)),
        )

    async def _open(self, invocation: Invocation) -> ContainerSocket:
        """Open the container's WebSocket.

        Raises:
            ApiError: the container refuses it, or does not respond.
        """
        began = time.monotonic()
        url = _socket_url(self._endpoint.container, invocation.target)
        opening = ContainerSocket.open(url, {"X-Amzn-SageMaker-Request-Id": invocation.id})
        try:
            container = await asyncio.wait_for(opening, OPEN_SECONDS)
        except InvalidHandshake as error:
            raise _refusal(error, invocation.log_stream) from error
        except (OSError, asyncio.TimeoutError) as error:
            reason = str(error) or f"no response within {OPEN_SECONDS:g} s"
            raise model_error(0, f"the WebSocket could not be opened: {reason}", invocation.log_stream) from error
        seconds = time.monotonic() - began
        if seconds > ACCEPT_SECONDS:
            log.warning("the container accepted the WebSocket after %.2f s; SageMaker allows 0.25 s", seconds)
        return container


def _socket_url(container: str, target: str) -> str:
    """Return the URL of the container's WebSocket.

    Args:
        container: the URL of the container.
        target: path and query of the WebSocket.
    """
    parts = urlsplit(container)
    scheme = "wss" if parts.scheme == "https" else "ws"
    return f"{scheme}://{parts.netloc}{target}"


def _refusal(error: InvalidHandshake, log_stream: str) -> ApiError:
    """Return the error for a container that does not accept the WebSocket."""
    response: Response | None = getattr(error, "response", None)
    if response is None:
        return model_error(0, f"the response to the WebSocket is invalid: {error}", log_stream)
    return model_error(response.status_code, bytes(response.body or b"").decode("utf-8", "replace"), log_stream)


def _target(headers: Mapping[str, str]) -> str:
    """Return the path and query of the container's WebSocket.

    Raises:
        ApiError: a header is invalid.
    """
    path = headers.get(f"{_AMZN}model-invocation-path", PATH)
    query = headers.get(f"{_AMZN}model-query-string", "")
    if len(path) > 100 or not _MODEL_PATH.fullmatch(path):
        raise validation_error("ModelInvocationPath must be a path of at most 100 characters without a leading slash.")
    if query and (len(query) > 2048 or not _QUERY.fullmatch(query)):
        raise validation_error(
            "ModelQueryString must have the form name=value&name=value, with at most 2048 characters."
        )
    return f"/{path}?{query}" if query else f"/{path}"


async def _relay(container: ContainerSocket, signature: EventSignature, receive: Any, send: Any) -> None:
    """Pass events and frames on until the WebSocket is closed."""
    incoming = asyncio.ensure_future(_to_container(container, signature, receive))
    pinging = asyncio.ensure_future(container.keep_alive())
    try:
        await _to_client(container, send)
        if incoming.done() and (error := incoming.exception()) is not None:
            await _send_part(send, _failure(error))
        elif container.error is not None:
            await _send_part(send, model_stream_error(*container.error))
        await send({"type": "http.response.body", "body": b""})
    finally:
        for task in (incoming, pinging):
            task.cancel()
        await asyncio.gather(incoming, pinging, return_exceptions=True)


async def _to_container(container: ContainerSocket, signature: EventSignature, receive: Any) -> None:
    """Pass the client's events on as frames, and close the WebSocket when the client has ended its stream.

    Raises:
        ApiError: an event is invalid.
    """
    events = EventReader()
    continues = False
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return container.abort()
            for outer in events.add(message["body"]):
                signature.check(outer)
                if not outer.payload:
                    continue  # the end of the stream
                frame = read_frame(decode(outer.payload), continues=continues)
                continues = not frame.fin
                await container.send(frame)
            if not message["more_body"]:
                if events.is_within_event:
                    raise validation_error("The event stream ends within an event.")
                return container.close()
    except Exception:
        container.close(CloseCode.GOING_AWAY)
        raise


async def _to_client(container: ContainerSocket, send: Any) -> None:
    """Pass the container's frames on as events."""
    kind = "UTF8"
    async for frame in container.frames():
        if frame.opcode is not Opcode.CONT:
            kind = "UTF8" if frame.opcode is Opcode.TEXT else "BINARY"
        await _send_part(send, write_event(frame, kind))


async def _send_part(send: Any, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


def _failure(error: BaseException) -> bytes:
    """Return the exception of the stream for an error in the client's events."""
    if isinstance(error, ApiError):
        log.info("the stream ended: %s: %s", error.code, error)
        return model_stream_error(error.code, str(error))
    log.error("the stream could not be relayed", exc_info=error)
    return internal_stream_failure("The stream processing failed.")


async def _send_error(send: Any, error: ApiError) -> None:
    code = _ERRORS.get(error.code, error.code)
    members = {"ErrorCode": error.code} if code == "InputValidationError" else error.members
    body = json.dumps({"Message": str(error), **members}).encode()
    headers = {"content-type": "application/json", "x-amzn-errortype": code, "content-length": str(len(body))}
    await send({"type": "http.response.start", "status": error.status, "headers": _encoded(headers)})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def listening(
    endpoint: Endpoint, host: str, port: int, directory: Path, secret: Callable[[str], str | None]
) -> AsyncIterator[tuple[str, Path]]:
    """Serve the operation, and yield its URL and the file with the certificate that clients must trust.

    Args:
        port: port to listen on, or 0 for any free port.
        directory: directory for the certificate and its key.

    Raises:
        DeployError: the server cannot listen on the host and port.
    """
    authority = trustme.CA()
    names = {"localhost", "127.0.0.1", "::1"} if _is_local(host) else {"localhost", host}
    certificate = authority.issue_cert(*sorted(names))
    authority.cert_pem.write_to_path(directory / "certificate.pem")
    certificate.private_key_and_cert_chain_pem.write_to_path(directory / "server.pem")
    context = tls_context(str(directory / "server.pem"))
    connections: set[Http2Connection] = set()
    connect = functools.partial(Http2Connection, BidirectionalEmulator(endpoint, secret), connections)
    try:
        server = await asyncio.get_running_loop().create_server(connect, host, port, ssl=context)
    except OSError as error:
        raise cannot_listen(host, port, error, "--bidirectional-port") from None
    try:
        yield _url(host, server.sockets[0].getsockname()[1]), directory / "certificate.pem"
    finally:
        server.close()  # otherwise this would wait for the clients
        await asyncio.gather(*(connection.close() for connection in connections))


def _is_local(host: str) -> bool:
    """Return whether a client on this machine can reach `host` as localhost."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def _url(host: str, port: int) -> str:
    if _is_local(host):
        host = "[::1]" if host == "::1" else "localhost"
    elif ":" in host:
        host = f"[{host}]"
    return f"https://{host}:{port}"


@contextlib.asynccontextmanager
async def with_bidirectional_streams(
    port: int, plan: LocalPlan, report: Callable[[str], None], log: Log
) -> AsyncIterator[str]:
    """Serve the API of the plan's endpoint together with bidirectional streams, and yield its URL (see `Front`).

    Raises:
        DeployError: the API cannot listen on the host and port.
    """
    with tempfile.TemporaryDirectory(prefix="lmi-bidirectional-") as directory:
        streams = listening(plan.endpoint, plan.host, port, Path(directory), _secret_of)
        async with streams as (url, certificate), endpoint_front(plan, report, log) as api:
            report(f"bidirectional streams are at {url}; for AWS's SDK: export SSL_CERT_FILE={certificate}")
            yield api


def _secret_of(key: str) -> str | None:
    """Return the secret key that belongs to an access key in this environment, or None."""
    return os.environ.get("AWS_SECRET_ACCESS_KEY") if os.environ.get("AWS_ACCESS_KEY_ID") == key else None


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]
