"""An HTTP/2 server over TLS whose requests and responses stream in both directions at once, as ASGI messages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError

log = logging.getLogger("deploy.emulator")

MAX_IDLE = 10_000
"""Maximum number of frames without progress that a client may send, such as PING, SETTINGS, empty DATA and RST_STREAM.

Each may cost a frame in reply, which waits in memory if the client does not read. Servers elsewhere allow 1,000 to
10,000 replies in their queue.
"""

Message = Mapping[str, Any]
App = Callable[
    [Mapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]


class Stream:
    """A request and its response.

    Args:
        connection: connection of the stream.
        id: id of the stream.
    """

    def __init__(self, connection: Http2Connection, id: int) -> None:
        self._connection = connection
        self._id = id
        self._messages = deque[tuple[Message, int]]()  # each with the bytes to acknowledge when it is taken
        self._arrived = asyncio.Event()
        self._is_closed = False
        self.writable = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def put(self, data: bytes, size: int, *, last: bool) -> None:
        """Queue a chunk of the request body.

        Args:
            size: number of bytes that count for flow control.
        """
        self._messages.append(({"type": "http.request", "body": data, "more_body": not last}, size))
        self._arrived.set()

    def close(self) -> None:
        """Tell the application that the client has disconnected."""
        self._is_closed = True
        self._arrived.set()
        self.writable.set()

    async def receive(self) -> Message:
        while not self._messages:
            if self._is_closed:
                return {"type": "http.disconnect"}
            self._arrived.clear()
            await self._arrived.wait()
        message, size = self._messages.popleft()
        self._connection.acknowledge(self._id, size)
        return message

    async def send(self, message: Message) -> None:
        """Send a message of the response, and wait until the client reads. Do nothing if the response has ended."""
        if message["type"] == "http.response.start":
            return None if self._is_closed else self._connection.send_headers(self._id, message)
        data, last = message.get("body", b""), not message.get("more_body", False)
        while not self._is_closed:
            size = self._connection.send_data(self._id, data, last=last)
            if size == len(data):
                return
            data = data[size:]
            self.writable.clear()
            await self.writable.wait()


class Http2Connection(asyncio.Protocol):
    """A connection of a client.

    Args:
        app: application that serves the requests, as in ASGI.
        connections: the open connections, which include this one while it is open.
    """

    transport: asyncio.Transport

    def __init__(self, app: App, connections: set[Http2Connection]) -> None:
        self._app = app
        self._connections = connections
        self._is_paused = False
        self._h2 = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        self._streams: dict[int, Stream] = {}
        self._num_idle = 0  # frames since the last bytes of a body

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._connections.add(self)
        self._h2.initiate_connection()
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        for stream in self._streams.values():
            stream.close()

    def pause_writing(self) -> None:
        """Stop writing data, because clients may open windows of gigabytes."""
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._wake()

    async def close(self) -> None:
        """Cancel all streams, and end the connection."""
        tasks = [stream.task for stream in self._streams.values() if stream.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(ProtocolError):  # the client has ended the connection
            self._h2.close_connection()
        self._flush()
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        try:
            events = self._h2.receive_data(data)
        except ProtocolError as error:
            log.info("HTTP/2: %s", error)
            self._flush()
            return self.transport.close()
        for event in events:
            self._handle(event)
            self._count(event)
            if self._num_idle > MAX_IDLE:
                log.info("HTTP/2: a connection is closed after %d frames without progress", MAX_IDLE)
                return self._refuse()
        self._flush()

    def _count(self, event: object) -> None:
        """Count a frame. Bytes of a body are progress, unless the client does not read the replies meanwhile."""
        if isinstance(event, DataReceived) and event.data and not self._is_paused:
            self._num_idle = 0
        else:
            self._num_idle += 1

    def _refuse(self) -> None:
        """End the connection of a client that floods it."""
        with contextlib.suppress(ProtocolError):  # the client has ended the connection
            self._h2.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
        self._flush()
        if self._is_paused:  # what waits would keep it open
            return self.transport.abort()
        self.transport.close()

    def _handle(self, event: object) -> None:
        if isinstance(event, RequestReceived):
            self._begin(event)
        elif isinstance(event, DataReceived):
            stream = self._streams.get(event.stream_id)
            if stream is None:  # the response is complete, so that the rest of the request is dropped
                self.acknowledge(event.stream_id, event.flow_controlled_length)
            elif event.flow_controlled_length:  # empty frames are outside flow control, so they are not queued
                stream.put(event.data, event.flow_controlled_length, last=False)
        elif isinstance(event, StreamEnded) and event.stream_id in self._streams:
            self._streams[event.stream_id].put(b"", 0, last=True)
        elif isinstance(event, StreamReset) and event.stream_id in self._streams:
            self._streams[event.stream_id].close()
        elif isinstance(event, WindowUpdated | RemoteSettingsChanged):
            self._wake()
        elif isinstance(event, ConnectionTerminated):
            self.transport.close()

    def _wake(self) -> None:
        for stream in self._streams.values():
            stream.writable.set()

    def _begin(self, event: RequestReceived) -> None:
        id = event.stream_id
        if len(self._streams) >= self._h2.local_settings.max_concurrent_streams:  # the client has reset some of them
            return self._reset(id, ErrorCodes.REFUSED_STREAM)
        scope = _scope_of(event, self.transport.get_extra_info("sockname")[:2])
        stream = self._streams[id] = Stream(self, id)
        stream.task = asyncio.ensure_future(self._run(id, scope, stream))

    async def _run(self, id: int, scope: Mapping[str, Any], stream: Stream) -> None:
        code = ErrorCodes.INTERNAL_ERROR
        try:
            await self._app(scope, stream.receive, stream.send)
            code = ErrorCodes.NO_ERROR
        except Exception:
            log.exception("%s failed", scope["path"])
        finally:
            del self._streams[id]
            self._reset(id, code)

    def _reset(self, id: int, code: ErrorCodes) -> None:
        """Tell the client that no more data is read, unless the stream has ended."""
        try:
            self._h2.reset_stream(id, code)
        except ProtocolError:  # the stream has ended, as it should
            return
        self._flush()

    # -- what streams do -----------------------------------------------------------------------------------------

    def acknowledge(self, id: int, size: int) -> None:
        """Let the client send more, because the application has read bytes of its request."""
        if size:
            try:
                self._h2.acknowledge_received_data(size, id)
            except ProtocolError:  # the stream has ended
                return
            self._flush()

    def send_headers(self, id: int, message: Message) -> None:
        self._h2.send_headers(id, [(b":status", str(message["status"]).encode()), *message["headers"]])
        self._flush()

    def send_data(self, id: int, data: bytes, *, last: bool) -> int:
        """Send as much data as the client accepts, and return the number of bytes."""
        if not data:
            self._h2.send_data(id, b"", end_stream=last)
        sent = 0
        while sent < len(data) and not self._is_paused:
            room = min(self._h2.local_flow_control_window(id), self._h2.max_outbound_frame_size)
            part = data[sent : sent + room]
            if not part:
                break
            sent += len(part)
            self._h2.send_data(id, part, end_stream=last and sent == len(data))
            self._num_idle = 0
            self._flush()
        self._flush()
        return sent

    def _flush(self) -> None:
        if data := self._h2.data_to_send():
            self.transport.write(data)


def _scope_of(event: RequestReceived, server: tuple[str, int]) -> dict[str, Any]:
    """Return the ASGI scope of a request.

    Args:
        server: host and port on which the server listens.
    """
    fields = dict(event.headers)
    path, _, query = fields.get(b":path", b"").partition(b"?")
    headers = [(b"host", fields.get(b":authority", b""))]
    return {
        "type": "http",
        "method": fields[b":method"].decode("latin-1"),
        "path": path.decode("latin-1"),
        "query_string": query,
        "headers": headers + [item for item in event.headers if not item[0].startswith(b":")],
        "server": server,
    }


def tls_context(certificate: str) -> ssl.SSLContext:
    """Return the TLS settings of an HTTP/2 server.

    Args:
        certificate: path of a PEM file with the certificate and its key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.set_alpn_protocols(["h2"])
    return context
