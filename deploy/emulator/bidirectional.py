"""InvokeEndpointWithBidirectionalStream in front of a container, for AWS's unmodified SDK.

The SDK uses HTTP/2 over TLS. SageMaker opens a WebSocket to the container. It passes each event of the client on as one
frame, and each frame of the container as one event.

See https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import hmac
import json
import logging
import os
import re
import struct
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import trustme
from botocore.eventstream import EventStreamBuffer, EventStreamMessage, ParserError
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.uri import parse_uri

from deploy.emulator.access import check_host, check_signature
from deploy.emulator.endpoint import Endpoint
from deploy.emulator.http2 import Http2Connection, tls_context
from deploy.emulator.protocol import VARIANT, ApiError, model_error, validation_error
from deploy.emulator.relay import CONTENT_TYPE, encode, encode_headers, internal_stream_failure, model_stream_error
from deploy.emulator.serving import LocalPlan, Log, cannot_listen, endpoint_front

log = logging.getLogger("deploy.emulator")

PATH = "invocations-bidirectional-stream"
PING_SECONDS = 60.0
MAX_UNANSWERED = 5
MAX_SECONDS = 1800.0  # maximum life of a stream
_ACCEPT_SECONDS = 0.25  # SageMaker's maximum for the container to accept the WebSocket; the emulator only warns
_OPEN_SECONDS = 10.0
_MAX_EVENT = 1 << 24  # bytes

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


class EventSignature:
    """The signatures of a client's events, each of which covers the one before.

    See the section on event streams of Signature Version 4.

    Args:
        authorization: the Authorization header of the request.
        secret: secret key that belongs to the access key, or None to check only the form.
    """

    def __init__(self, authorization: str, secret: str | None) -> None:
        fields = dict(part.strip().partition("=")[::2] for part in authorization.partition(" ")[2].split(","))
        _, date, region, service, terminator = fields["Credential"].rsplit("/", 4)
        self._scope = "/".join((date, region, service, terminator))
        self._previous = fields["Signature"]
        self._key: bytes | None = None
        if secret is not None:
            key = f"AWS4{secret}".encode()
            for part in (date, region, service, terminator):
                key = hmac.new(key, part.encode(), hashlib.sha256).digest()
            self._key = key

    def check(self, message: EventStreamMessage) -> None:
        """Raise ApiError if a message is not signed as the next one."""
        date, signature = message.headers.get(":date"), message.headers.get(":chunk-signature")
        if (
            not isinstance(date, int)
            or not isinstance(signature, bytes)
            or len(signature) != hashlib.sha256().digest_size
        ):
            raise ApiError(403, "IncompleteSignature", "An event has no :date or no :chunk-signature.")
        if self._key is None:
            return
        header = b"\x05:date\x08" + struct.pack("!q", date)
        text = "\n".join(
            (
                "AWS4-HMAC-SHA256-PAYLOAD",
                datetime.fromtimestamp(date / 1000, timezone.utc).strftime("%Y%m%dT%H%M%SZ"),
                self._scope,
                self._previous,
                hashlib.sha256(header).hexdigest(),
                hashlib.sha256(message.payload).hexdigest(),
            )
        )
        expected = hmac.new(self._key, text.encode(), hashlib.sha256)
        if not hmac.compare_digest(expected.digest(), signature):
            raise ApiError(403, "InvalidSignatureException", "The signature of an event does not match.")
        self._previous = expected.hexdigest()


def read_frame(message: EventStreamMessage, *, continues: bool) -> Frame:
    """Return the frame for an event of the client.

    Args:
        continues: whether the event before it was PARTIAL.

    Raises:
        ApiError: the event is not a PayloadPart.
    """
    headers = message.headers
    if headers.get(":message-type") != "event" or headers.get(":event-type") != "PayloadPart":
        raise validation_error("Each event must be a PayloadPart.")
    state, kind = headers.get("CompletionState", "COMPLETE"), headers.get("DataType", "BINARY")
    if state not in ("PARTIAL", "COMPLETE") or kind not in ("UTF8", "BINARY"):
        raise validation_error("CompletionState must be PARTIAL or COMPLETE, and DataType UTF8 or BINARY.")
    opcode = Opcode.TEXT if kind == "UTF8" else Opcode.BINARY
    return Frame(Opcode.CONT if continues else opcode, message.payload, fin=state == "COMPLETE")


def write_event(frame: Frame, kind: str) -> bytes:
    """Return the event for a frame of the container."""
    headers = {
        ":message-type": "event",
        ":event-type": "PayloadPart",
        ":content-type": "application/octet-stream",
        "DataType": kind,
        "CompletionState": "COMPLETE" if frame.fin else "PARTIAL",
    }
    return encode(encode_headers(headers), bytes(frame.data))


class ContainerSocket:
    """A WebSocket to the container, frame by frame.

    Attributes:
        closed: the close frame that the container has sent by itself, as code and reason, or None.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, protocol: ClientProtocol) -> None:
        self._reader = reader
        self._writer = writer
        self._protocol = protocol
        self._num_pings = 0
        self.closed: tuple[int, str] | None = None

    @classmethod
    async def open(cls, url: str, headers: Mapping[str, str]) -> ContainerSocket:
        """Open a WebSocket.

        Raises:
            OSError: the container cannot be reached.
            InvalidHandshake: the container refuses the WebSocket.
        """
        uri = parse_uri(url)
        reader, writer = await asyncio.open_connection(uri.host, uri.port)
        protocol = ClientProtocol(uri, max_size=_MAX_EVENT)
        opened = cls(reader, writer, protocol)
        try:
            request = protocol.connect()
            for name, value in headers.items():
                request.headers[name] = value
            protocol.send_request(request)
            await opened._flush()
            while protocol.state is State.CONNECTING and protocol.handshake_exc is None:
                protocol.receive_data(await reader.read(1 << 16)) if not reader.at_eof() else protocol.receive_eof()
            opened._events = protocol.events_received()
            if protocol.handshake_exc is not None:
                raise protocol.handshake_exc
        except BaseException:
            writer.close()
            raise
        return opened

    _events: list[Any]

    async def send(self, frame: Frame) -> None:
        """Send a frame, and wait while the container does not read."""
        if self._protocol.state is State.OPEN:
            self._protocol.send_frame(frame)
            await self._flush()

    async def frames(self) -> AsyncIterator[Frame]:
        """Yield the data frames of the container until the WebSocket is closed."""
        for event in self._events:
            if isinstance(event, Frame) and event.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
                yield event
        while self._protocol.state is not State.CLOSED:
            data = await self._reader.read(1 << 16)
            if data:
                self._protocol.receive_data(data)
            else:
                self._protocol.receive_eof()
            for event in self._protocol.events_received():
                if not isinstance(event, Frame):
                    continue
                if event.opcode is Opcode.PONG:
                    self._num_pings = 0
                elif event.opcode is Opcode.CLOSE:
                    self._note_close()
                elif event.opcode is not Opcode.PING:
                    yield event
            await self._flush()

    def _note_close(self) -> None:
        received = self._protocol.close_rcvd
        if self._protocol.close_rcvd_then_sent and received is not None:
            self.closed = received.code, received.reason

    async def close(self, code: int = CloseCode.NORMAL_CLOSURE, reason: str = "") -> None:
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(code, reason)
            await self._flush()

    def abort(self) -> None:
        self._writer.close()

    async def ping(self) -> None:
        """Send pings until the container has missed too many, and then close the WebSocket."""
        began = time.monotonic()
        while self._protocol.state is State.OPEN:
            left = MAX_SECONDS - (time.monotonic() - began)
            if left <= 0:
                return await self.close(CloseCode.GOING_AWAY, "the maximum life of a stream")
            await asyncio.sleep(min(PING_SECONDS, left))
            if self._num_pings >= MAX_UNANSWERED:
                return self.abort()
            self._num_pings += 1
            if self._protocol.state is State.OPEN:
                self._protocol.send_ping(b"")
                await self._flush()

    async def _flush(self) -> None:
        with contextlib.suppress(OSError):  # the container has closed the connection
            for data in self._protocol.data_to_send():
                if data:
                    self._writer.write(data)
                elif self._writer.can_write_eof():
                    self._writer.write_eof()
            await self._writer.drain()


class BidirectionalEmulator:
    """An ASGI application that emulates the operation for one endpoint.

    Args:
        secret: returns the secret key of an access key, or None if it is unknown.
    """

    def __init__(self, endpoint: Endpoint, secret: Callable[[str], str | None]) -> None:
        self._endpoint = endpoint
        self._secret = secret

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        began = time.monotonic()
        try:
            invocation = self._check(scope)
            container = await self._open(invocation)
        except ApiError as error:
            log.info("%s: %s", error.code, error)
            return await _send_error(send, error)
        headers = {
            "content-type": CONTENT_TYPE,
            "x-amzn-invoked-production-variant": invocation.variant,
            "x-amzn-requestid": invocation.id,
        }
        await send({"type": "http.response.start", "status": 200, "headers": _encoded(headers)})
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        try:
            await _relay(container, invocation.signature, receive, send)
        finally:
            container.abort()
            log.info("%s %.2f s", scope["path"], time.monotonic() - began)

    def _check(self, scope: Mapping[str, Any]) -> Invocation:
        headers = {name.decode().lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        check_host(host, headers.get("origin"), str((scope.get("server") or ("",))[0]), headers.get("sec-fetch-site"))
        route = _ROUTE.fullmatch(scope["path"])
        if route is None or scope["method"] != "POST":
            text = f"No operation at {scope['path']}; only InvokeEndpointWithBidirectionalStream uses this port."
            raise ApiError(404, "UnknownOperationException", text)
        authorization = headers.get("authorization")
        region = check_signature(authorization, self._endpoint.region)
        if authorization is None or headers.get("x-amz-content-sha256") != _SIGNED_EVENTS:
            raise ApiError(403, "IncompleteSignature", f"x-amz-content-sha256 must be {_SIGNED_EVENTS}.")
        variant = self._endpoint.admit(route[1], headers.get(VARIANT.lower()))
        path = headers.get(f"{_AMZN}model-invocation-path", PATH)
        query = headers.get(f"{_AMZN}model-query-string", "")
        if len(path) > 100 or not _MODEL_PATH.fullmatch(path):
            raise _invalid("ModelInvocationPath must be a path of at most 100 characters without a leading slash.")
        if query and (len(query) > 2048 or not _QUERY.fullmatch(query)):
            raise _invalid("ModelQueryString must have the form name=value&name=value.")
        key = authorization.partition("Credential=")[2].partition("/")[0]
        return Invocation(
            f"/{path}?{query}" if query else f"/{path}",
            str(uuid.uuid4()),
            variant,
            self._endpoint.log_stream(region, None, variant),
            EventSignature(authorization, self._secret(key)),
        )

    async def _open(self, invocation: Invocation) -> ContainerSocket:
        """Open the container's WebSocket.

        Raises:
            ApiError: the container refuses it, or does not respond.
        """
        url = f"ws://{urlsplit(self._endpoint.container).netloc}{invocation.target}"
        began = time.monotonic()
        opening = ContainerSocket.open(url, {"X-Amzn-SageMaker-Request-Id": invocation.id})
        try:
            container = await asyncio.wait_for(opening, _OPEN_SECONDS)
        except InvalidHandshake as error:
            response: Response | None = getattr(error, "response", None)
            status = 0 if response is None else response.status_code
            text = "" if response is None else bytes(response.body or b"").decode("utf-8", "replace")
            raise model_error(status, text, invocation.log_stream) from error
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            raise model_error(0, f"the WebSocket could not be opened: {error}", invocation.log_stream) from error
        seconds = time.monotonic() - began
        if seconds > _ACCEPT_SECONDS:
            log.warning("the container accepted the WebSocket after %.2f s; SageMaker allows 0.25 s", seconds)
        return container


async def _relay(container: ContainerSocket, signature: EventSignature, receive: Any, send: Any) -> None:
    """Pass events and frames on until both sides have ended."""
    incoming = asyncio.ensure_future(_to_container(container, signature, receive))
    pinging = asyncio.ensure_future(container.ping())
    try:
        await _to_client(container, send)
        if incoming.done() and not incoming.cancelled() and incoming.exception() is not None:
            await _send_failure(send, incoming.exception())
        elif container.closed is not None:
            code, reason = container.closed
            await _send_part(send, model_stream_error(str(code), reason))
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
    events = EventStreamBuffer()
    continues = False
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return container.abort()
            events.add_data(message.get("body", b""))
            for outer in events:
                signature.check(outer)
                if not outer.payload:
                    continue  # the end of the stream
                inner = EventStreamBuffer()
                inner.add_data(outer.payload)
                frame = read_frame(next(inner), continues=continues)
                continues = not frame.fin
                await container.send(frame)
            if not message.get("more_body", False):
                return await container.close()
    except (ParserError, StopIteration) as error:
        await container.close(CloseCode.GOING_AWAY)
        raise validation_error(f"The event stream is invalid: {error}") from error
    except Exception:
        await container.close(CloseCode.GOING_AWAY)
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


async def _send_failure(send: Any, error: BaseException | None) -> None:
    log.info("the stream ended: %s", error)
    if isinstance(error, ApiError):
        await _send_part(send, model_stream_error(error.code, str(error)))
    else:
        await _send_part(send, internal_stream_failure("The stream processing failed."))


async def _send_error(send: Any, error: ApiError) -> None:
    body = json.dumps({"Message": str(error), **error.members}).encode()
    headers = {"content-type": "application/json", "x-amzn-errortype": error.code, "content-length": str(len(body))}
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
    certificate = authority.issue_cert("localhost", host)
    authority.cert_pem.write_to_path(directory / "certificate.pem")
    certificate.private_key_and_cert_chain_pem.write_to_path(directory / "server.pem")
    context = tls_context(str(directory / "server.pem"))
    connect = functools.partial(Http2Connection, BidirectionalEmulator(endpoint, secret))
    try:
        server = await asyncio.get_running_loop().create_server(connect, host, port, ssl=context)
    except OSError as error:
        raise cannot_listen(host, port, error) from None
    async with server:
        yield f"https://localhost:{server.sockets[0].getsockname()[1]}", directory / "certificate.pem"


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


def _invalid(message: str) -> ApiError:
    return ApiError(400, "InputValidationError", message, ErrorCode="ValidationError")


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]
