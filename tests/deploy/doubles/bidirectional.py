"""A caller of InvokeEndpointWithBidirectionalStream on `h2`, and a container that does as its path says."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import socket
import ssl
import struct
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import h2.connection
import h2.events
from botocore.eventstream import EventStreamBuffer, EventStreamMessage
from websockets.exceptions import InvalidHandshake
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

SECONDS = 20.0
KEY, SECRET = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
SCOPE = "20261129/eu-west-1/sagemaker/aws4_request"
FIRST = "ab" * 32
AUTHORIZATION = f"AWS4-HMAC-SHA256 Credential={KEY}/{SCOPE}, SignedHeaders=host;x-amz-date, Signature={FIRST}"
PATH = "/endpoints/local/invocations-bidirectional-stream"
HEADERS = {
    "content-type": "application/vnd.amazon.eventstream",
    "x-amz-content-sha256": "STREAMING-AWS4-HMAC-SHA256-EVENTS",
    "authorization": AUTHORIZATION,
}


# -- messages of the client, after the format of event streams and the recorded signatures --------------------------


def header(name: str, value: str | bytes | int) -> bytes:
    head = bytes([len(name)]) + name.encode()
    if isinstance(value, int):
        return head + b"\x08" + struct.pack("!q", value)
    kind, data = (b"\x07", value.encode()) if isinstance(value, str) else (b"\x06", value)
    return head + kind + struct.pack("!H", len(data)) + data


def message(headers: bytes, payload: bytes = b"") -> bytes:
    lengths = struct.pack("!II", 16 + len(headers) + len(payload), len(headers))
    data = lengths + struct.pack("!I", zlib.crc32(lengths)) + headers + payload
    return data + struct.pack("!I", zlib.crc32(data))


def part(data: bytes, kind: str | None = "UTF8", state: str | None = None, event: str = "PayloadPart") -> bytes:
    """An event as AWS's SDK sends it: what is not set has no header."""
    headers = {":message-type": "event", ":event-type": event, "DataType": kind, "CompletionState": state}
    present = {name: value for name, value in headers.items() if value is not None}
    return message(b"".join(header(*item) for item in {**present, ":content-type": "a/b"}.items()), data)


class Signing:
    """Signs events one after another."""

    def __init__(self, secret: str = SECRET, milliseconds: int = 1_795_947_072_250) -> None:
        self._secret = secret
        self._milliseconds = milliseconds
        self._previous = FIRST

    def __call__(self, payload: bytes) -> bytes:
        moment = header(":date", self._milliseconds)
        text = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._milliseconds // 1000))
        scope = [text[:8], *SCOPE.split("/")[1:]]
        digests = hashlib.sha256(moment).hexdigest(), hashlib.sha256(payload).hexdigest()
        key = b"AWS4" + self._secret.encode()
        for item in (*scope, "\n".join(["AWS4-HMAC-SHA256-PAYLOAD", text, "/".join(scope), self._previous, *digests])):
            key = hmac.new(key, item.encode(), hashlib.sha256).digest()
        self._previous = key.hex()
        return message(moment + header(":chunk-signature", key), payload)


# -- the caller -----------------------------------------------------------------------------------------------------


class Caller:
    """One HTTP/2 connection; with a certificate, over TLS."""

    def __init__(self, url: str, certificate: Path | None = None) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.socket = socket.create_connection((parts.hostname, parts.port or 0), SECONDS)
        if certificate is not None:
            context = ssl.create_default_context(cafile=str(certificate))
            context.set_alpn_protocols(["h2"])
            self.socket = context.wrap_socket(self.socket, server_hostname=parts.hostname)
        self._authority = parts.netloc
        self.h2 = h2.connection.H2Connection()
        self.h2.initiate_connection()
        self.events: list[Any] = []
        self.flush()

    def flush(self) -> None:
        self.socket.sendall(self.h2.data_to_send())

    def begin(self, headers: Mapping[str, str] = HEADERS, path: str = PATH) -> int:
        stream: int = self.h2.get_next_available_stream_id()
        fields = {":method": "POST", ":scheme": "https", ":authority": self._authority, ":path": path, **headers}
        self.h2.send_headers(stream, list(fields.items()))
        self.flush()
        return stream

    def send(self, stream: int, data: bytes, *, end: bool = False) -> None:
        """Send data, as the windows allow."""
        while data:
            room = min(self.h2.local_flow_control_window(stream), self.h2.max_outbound_frame_size)
            if not room:
                self._read()
                continue
            self.h2.send_data(stream, data[:room])
            data = data[room:]
            self.flush()
        if end:
            self.h2.end_stream(stream)
            self.flush()

    def end(self, stream: int, sign: Callable[[bytes], bytes]) -> None:
        self.send(stream, sign(b""), end=True)

    def _read(self) -> None:
        data = self.socket.recv(1 << 16)
        if not data:
            raise EOFError
        self.events += self.h2.receive_data(data)
        self.flush()

    def wait(self, kind: type[Any], stream: int | None = None) -> Any:
        """The first event of this type, which is taken out."""
        while True:
            for event in self.events:
                if isinstance(event, kind) and (stream is None or event.stream_id == stream):
                    self.events.remove(event)
                    return event
            self._read()

    def response(self, stream: int) -> tuple[int, dict[str, str]]:
        fields = {
            name.decode(): value.decode() for name, value in self.wait(h2.events.ResponseReceived, stream).headers
        }
        return int(fields.pop(":status")), fields

    def data(self, stream: int) -> Iterator[bytes]:
        """The data of a response until its end."""
        while True:
            event = self.wait((h2.events.DataReceived, h2.events.StreamEnded), stream)  # type: ignore[arg-type]
            if isinstance(event, h2.events.StreamEnded):
                return
            self.h2.acknowledge_received_data(event.flow_controlled_length, stream)
            self.flush()
            yield event.data

    def parts(self, stream: int) -> Iterator[EventStreamMessage]:
        buffer = EventStreamBuffer()
        for data in self.data(stream):
            buffer.add_data(data)
            yield from buffer

    def whole(self, stream: int) -> tuple[list[tuple[bytes, str, str]], dict[str, str] | None]:
        """The parts of a stream as (bytes, data type, completion state), and the exception that ends it."""
        parts, error = [], None
        for item in self.parts(stream):
            assert error is None, "an exception ends the stream"
            if item.headers[":message-type"] == "exception":
                error = {"": item.headers[":exception-type"], **json.loads(item.payload)}
            else:
                assert item.headers[":event-type"] == "PayloadPart"
                parts.append((item.payload, item.headers["DataType"], item.headers["CompletionState"]))
        return parts, error

    def close(self) -> None:
        self.socket.close()


# -- the container --------------------------------------------------------------------------------------------------

Script = Callable[[ServerProtocol, "Frame | None"], None]
"""What a container does when the socket opens (None), and at each data frame."""


class FakeContainer:
    """A server of WebSockets, frame by frame.

    Attributes:
        scripts: what it does, by path. It refuses other paths with status 404.
        mute: whether it sends no pongs, no close frames and no end of the connection.
    """

    def __init__(self, scripts: Mapping[str, Script]) -> None:
        self.scripts = scripts
        self.mute = False
        self.requests: list[Request] = []
        self.frames: list[tuple[Opcode, bytes, bool]] = []
        self.gone = asyncio.Event()
        self._tasks: list[asyncio.Task[Any]] = []

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)  # the transports end

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        protocol = ServerProtocol(max_size=None)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.append(task)
        script: Script = silent
        try:
            while protocol.state is not State.CLOSED:
                data = await _unit(reader, protocol)
                protocol.receive_data(data) if data else protocol.receive_eof()
                for event in protocol.events_received():
                    if isinstance(event, Request):
                        script = self._accept(protocol, event)
                        self._flush(protocol, writer)
                        script(protocol, None)
                    elif isinstance(event, Frame):
                        self.frames.append((event.opcode, bytes(event.data), event.fin))
                        if event.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
                            script(protocol, event)
                self._flush(protocol, writer, silent=self.mute)
        except Vanish:
            writer.transport.abort()
        except Deaf:
            await asyncio.Event().wait()
        except OSError:
            pass
        finally:
            self.gone.set()
            writer.close()

    def _accept(self, protocol: ServerProtocol, request: Request) -> Script:
        self.requests.append(request)
        script = self.scripts.get(request.path.partition("?")[0])
        if script is None:
            protocol.send_response(protocol.reject(404, "no such path\n"))
            return silent
        with contextlib.suppress(InvalidHandshake):
            protocol.send_response(protocol.accept(request))
        return script

    def _flush(self, protocol: ServerProtocol, writer: asyncio.StreamWriter, *, silent: bool = False) -> None:
        for data in protocol.data_to_send():
            if silent:
                continue
            if data:
                writer.write(data)
            else:
                writer.write_eof()


async def _unit(reader: asyncio.StreamReader, protocol: ServerProtocol) -> bytes:
    """The request or the next frame, so that what a script sends comes before the reply to what follows."""
    try:
        if protocol.state is State.CONNECTING:
            return await reader.readuntil(b"\r\n\r\n")
        head = await reader.readexactly(2)
        extra = {126: 2, 127: 8}.get(head[1] & 127, 0)
        head += await reader.readexactly(extra)
        size = int.from_bytes(head[2:], "big") if extra else head[1] & 127
        return head + await reader.readexactly(size + 4)
    except asyncio.IncompleteReadError:
        return b""


class Deaf(Exception):
    """The container reads and writes nothing from now on."""


class Vanish(Exception):
    """The container ends the connection without a close frame."""


def silent(protocol: ServerProtocol, frame: Frame | None) -> None:
    """Send nothing."""


def echo(protocol: ServerProtocol, frame: Frame | None) -> None:
    if frame is not None:
        protocol.send_frame(Frame(frame.opcode, frame.data, frame.fin))


def vanish(protocol: ServerProtocol, frame: Frame | None) -> None:
    if frame is not None:
        raise Vanish


def closing(code: int, reason: str, *, at_once: bool = False) -> Script:
    def script(protocol: ServerProtocol, frame: Frame | None) -> None:
        if at_once or frame is not None:
            protocol.send_close(code, reason)

    return script
