"""The WebSocket that SageMaker opens to a container for a bidirectional stream, frame by frame."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple

from botocore.eventstream import EventStreamMessage
from websockets.client import ClientProtocol
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

from deploy.emulator.protocol import validation_error
from deploy.emulator.relay import BROKEN, STALLED, encode, encode_headers

PING_SECONDS = 60.0
MAX_UNANSWERED = 5
MAX_SECONDS = 1800.0  # maximum lifetime of a stream
CLOSE_SECONDS = 10.0
"""Seconds between a close frame and the end of the connection."""
_MAX_MESSAGE = 1 << 24  # bytes
_READ = 1 << 16  # bytes
_DATA = (Opcode.TEXT, Opcode.BINARY, Opcode.CONT)


class StreamError(NamedTuple):
    """The members of a ModelStreamError."""

    code: str
    message: str


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
    """Return the event for a frame of the container.

    Args:
        kind: data type of the message that the frame belongs to, UTF8 or BINARY.
    """
    headers = {
        ":message-type": "event",
        ":event-type": "PayloadPart",
        ":content-type": "application/octet-stream",
        "DataType": kind,
        "CompletionState": "COMPLETE" if frame.fin else "PARTIAL",
    }
    return encode(encode_headers(headers), bytes(frame.data))


class ContainerSocket:
    """An open WebSocket.

    Attributes:
        error: error that ends the client's stream, or None while there is none.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, protocol: ClientProtocol) -> None:
        self._reader = reader
        self._writer = writer
        self._protocol = protocol
        self._num_pings = 0  # pings without a pong
        self._deadline: asyncio.TimerHandle | None = None
        self.error: StreamError | None = None

    @classmethod
    async def open(cls, url: str, headers: Mapping[str, str]) -> ContainerSocket:
        """Open a WebSocket.

        Args:
            url: a URL with the scheme ws or wss.

        Raises:
            OSError: the container cannot be reached.
            InvalidHandshake: the container refuses the WebSocket.
        """
        uri = parse_uri(url)
        reader, writer = await asyncio.open_connection(uri.host, uri.port, ssl=uri.secure or None)
        protocol = ClientProtocol(uri, max_size=_MAX_MESSAGE)
        container = cls(reader, writer, protocol)
        try:
            request = protocol.connect()
            for name, value in headers.items():
                request.headers[name] = value
            protocol.send_request(request)
            container._write()
            while protocol.state is State.CONNECTING and protocol.handshake_exc is None:
                await container._read()
            if protocol.handshake_exc is not None:
                raise protocol.handshake_exc
        except BaseException:
            container.abort()
            raise
        return container

    async def send(self, frame: Frame) -> None:
        """Send a frame, and wait until the container reads."""
        if self._protocol.state is State.OPEN:
            self._protocol.send_frame(frame)
            self._write()
            with contextlib.suppress(OSError):  # the container has closed the connection; `frames` reports it
                await self._writer.drain()

    async def frames(self) -> AsyncIterator[Frame]:
        """Yield the data frames of the container until the WebSocket is closed."""
        while True:
            for event in self._protocol.events_received():
                if not isinstance(event, Frame):
                    continue  # the response of the handshake
                if event.opcode in _DATA:
                    yield event
                elif event.opcode is Opcode.PONG:
                    self._num_pings = 0
            self._note_end()
            self._write()
            if self._protocol.state is State.CLOSED:
                return
            await self._read()

    def close(self, code: int = CloseCode.NORMAL_CLOSURE, reason: str = "") -> None:
        """Send a close frame. The connection ends when the container has sent its own, or soon after."""
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(code, reason)
            self._write()

    def abort(self) -> None:
        """End the connection at once."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._writer.transport.abort()

    async def keep_alive(self) -> None:
        """Send pings, and end the WebSocket if the container misses too many, or when its lifetime is over."""
        clock = asyncio.get_running_loop().time
        ends = clock() + MAX_SECONDS
        while self._protocol.state is State.OPEN:
            await asyncio.sleep(min(PING_SECONDS, ends - clock()))
            if self._num_pings >= MAX_UNANSWERED:
                self._fail("StreamBroken", f"Your model did not reply to {MAX_UNANSWERED} pings.")
                return self.abort()
            if clock() >= ends:
                self._fail("ModelInvocationTimeExceeded", STALLED)
                return self.close(CloseCode.GOING_AWAY, f"a stream lasts at most {MAX_SECONDS:g} s")
            if self._protocol.state is State.OPEN:
                self._num_pings += 1
                self._protocol.send_ping(b"")
                self._write()

    def _note_end(self) -> None:
        protocol = self._protocol
        if protocol.close_rcvd_then_sent and protocol.close_rcvd is not None:
            self._fail(str(int(protocol.close_rcvd.code)), protocol.close_rcvd.reason)
        elif isinstance(protocol.parser_exc, EOFError):
            if protocol.close_sent is None:  # the connection has ended by itself
                self._fail("StreamBroken", BROKEN)
        elif protocol.parser_exc is not None and protocol.close_sent is not None:
            self._fail(str(int(protocol.close_sent.code)), protocol.close_sent.reason)

    def _fail(self, code: str, message: str) -> None:
        """Keep the first error of the stream."""
        if self.error is None:
            self.error = StreamError(code, message)

    async def _read(self) -> None:
        try:
            data = await self._reader.read(_READ)
        except OSError:  # the container has reset the connection
            data = b""
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()

    def _write(self) -> None:
        """Write what the protocol has to send, without waiting: pongs must not wait for data."""
        for data in self._protocol.data_to_send():
            if data:
                self._writer.write(data)
            elif self._writer.can_write_eof():
                with contextlib.suppress(OSError):  # the container has closed the connection
                    self._writer.write_eof()
        if self._deadline is None and self._protocol.close_expected():
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(CLOSE_SECONDS, self._writer.transport.abort)
