"""A WebSocket connection, which takes over the transport of the HTTP connection that it began on."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from starlette.types import Scope
from websockets.datastructures import Headers
from websockets.extensions import Extension
from websockets.extensions.permessage_deflate import ServerPerMessageDeflateFactory
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from handler.core.errors import Overloaded
from handler.http.exchange import Flow, Successor, WriteFlow
from handler.http.protocol import LINGER_SECONDS, LoopTurns, Timer
from handler.serving.quota import BODY_MEMORY, Quota, Share

PING_SECONDS = 25.0  # between two pings, from which a connection is noticed whose client has gone
_MAX_UNANSWERED = 2  # pings without a pong, after which the client counts as gone
FIRST_SECONDS = 60.0  # maximum seconds until the first message
LAST_SECONDS = 60.0  # maximum seconds for running responses when the life of a connection has ended
_PIECE = 1 << 14  # bytes that are parsed in a turn, of which frames of two bytes take about 10 ms
_MAX_HELD = 1 << 16  # received bytes that wait for a turn; beyond it, no more is read
_MAX_FRAGMENTS = 1024  # maximum number of fragments of a message

_REALTIME = Subprotocol("realtime")
"""The subprotocol that browsers offer for realtime sessions, beside one that holds their key."""

_library_log = logging.getLogger("handler.websocket.library")
_library_log.setLevel(logging.WARNING)  # it logs the end of each connection

_TEXT = frozenset({Opcode.TEXT, Opcode.BINARY})


class Limits(NamedTuple):
    """The limits of a WebSocket.

    Attributes:
        message: maximum size of a message, in bytes.
        seconds: maximum lifetime of the connection, in seconds.
    """

    message: int
    seconds: float


class Receiver(Protocol):
    """Callbacks of a connection."""

    def on_message(self, message: bytes) -> None:
        """A message is complete. Binary messages are not distinguished from text."""

    def on_expiry(self) -> None:
        """The maximum lifetime of the connection has been reached."""

    def on_drain(self) -> None:
        """The server is stopping."""

    def on_close(self) -> None:
        """The connection is closed or is being closed, so no more can be sent. This is called once."""


class Socket(Protocol):
    """What sends to the client of an open WebSocket.

    Attributes:
        num_running: number of requests that share the buffer of unsent bytes.
    """

    num_running: int

    @property
    def flow(self) -> WriteFlow:
        """Return the flow control of what is sent."""

    @property
    def is_open(self) -> bool:
        """Return whether messages can be sent."""

    @property
    def num_unsent(self) -> int:
        """Return the number of bytes that the client's side has not accepted yet."""

    def serve(self, receiver: Receiver, memory: Quota) -> None:
        """Pass the messages of the client to a receiver, and count them in a quota until then."""

    def send_text(self, data: bytes) -> None:
        """Send a message as one text frame, if the connection is open."""

    def send_message(self, data: bytes) -> None:
        """Send a message as text, or as binary data if it is not UTF-8."""

    def close(self, code: int, reason: str) -> None:
        """Send a close frame, if the connection is open."""

    def shutdown(self) -> None:
        """Close the connection because the server is stopping."""

    def abort(self) -> None:
        """Close the connection immediately, without a close frame."""


class Handshake(NamedTuple):
    """The response to a request that opens a WebSocket.

    Attributes:
        response: response with status 101, or a refusal.
        extensions: extensions that the client and the server both support.
    """

    response: Response
    extensions: Sequence[Extension]


def shake_hands(scope: Scope, *, compresses: bool = False) -> Handshake:
    """Return the response to a request that opens a WebSocket. See RFC 6455, section 4.2.

    Args:
        compresses: whether messages may be compressed, if the client offers it (RFC 7692).
    """
    headers = Headers((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
    if "transfer-encoding" in headers or headers.get_all("content-length") not in ([], ["0"]):
        refusal = Response(400, "Bad Request", Headers(), b"a request that opens a WebSocket must have no body")
        return Handshake(refusal, [])
    target = (scope["raw_path"] + b"?" + scope["query_string"]).decode("latin-1")
    extensions = [_COMPRESSION] if compresses else None
    protocol = ServerProtocol(extensions=extensions, select_subprotocol=_select, logger=_library_log)
    return Handshake(protocol.accept(Request(target, headers)), protocol.extensions)


_COMPRESSION = ServerPerMessageDeflateFactory(
    server_max_window_bits=12, client_max_window_bits=12, compress_settings={"memLevel": 5}
)
"""Compression with small windows, which needs 64 KiB of memory per connection, as in the library's own server."""


def choose_subprotocol(offered: Iterable[str]) -> Subprotocol | None:
    """Return the subprotocol to use. A client's key must not be repeated."""
    return _REALTIME if _REALTIME in offered else None


def _select(protocol: ServerProtocol, offered: Sequence[Subprotocol]) -> Subprotocol | None:
    return choose_subprotocol(offered)


class _Parts:
    """The fragments of the message that is being received.

    Attributes:
        size: total size, in bytes.
        is_text: whether it is a text message.
    """

    def __init__(self) -> None:
        self._fragments: list[bytes] = []
        self.size = 0
        self.is_text = True

    def __len__(self) -> int:
        return len(self._fragments)

    def add(self, frame: Frame) -> None:
        if frame.opcode in _TEXT:
            self.is_text = frame.opcode is Opcode.TEXT
        self._fragments.append(bytes(frame.data))
        self.size += len(frame.data)

    def take(self) -> bytes:
        """Remove the fragments, and return the message."""
        message = b"".join(self._fragments)
        self.clear()
        return message

    def clear(self) -> None:
        self._fragments.clear()
        self.size = 0


class WebSocket(Successor):
    """An open WebSocket connection. Pings get pongs while requests are running, because it is read then too.

    It is not read while the client does not read: responses to its pings and messages would otherwise use ever more
    memory.

    Args:
        handshake: handshake that accepts the connection.
        turns: turns that the connections of the server share.
        memory: quota in which a message is counted while it is received.

    Attributes:
        flow: flow control, set by `connection_made`.
        num_running: number of requests that share the buffer of unsent bytes.
    """

    flow: Flow
    transport: asyncio.Transport
    _receiver: Receiver

    def __init__(
        self,
        handshake: Handshake,
        turns: LoopTurns,
        memory: Quota,
        limits: Limits,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._protocol = ServerProtocol(state=State.OPEN, max_size=limits.message, logger=_library_log)
        self._protocol.extensions = [*handshake.extensions]
        self._response = handshake.response
        self._turns = turns
        self._memory = Share(memory)
        self._loop = loop or asyncio.get_running_loop()
        self._timer = Timer(self._loop)
        self._expires_at = self._loop.time() + limits.seconds
        self._held = bytearray()  # bytes that wait for a turn
        self._parts = _Parts()
        self._messages = deque[bytes]()  # messages that wait for a turn
        self._num_pings = 0  # pings of the server without a pong
        self._has_messages = False
        self._is_expired = False
        self._has_ended = False
        self.num_running = 0

    @property
    def is_open(self) -> bool:
        return self._protocol.state is State.OPEN

    @property
    def num_unsent(self) -> int:
        return self.transport.get_write_buffer_size()

    def serve(self, receiver: Receiver, memory: Quota) -> None:
        """Pass the messages of the client to a receiver. This may be called again, with another one.

        Args:
            memory: quota in which a message is counted while it is received.
        """
        self._receiver = receiver
        size = self._memory.size
        self._memory.close()
        self._memory = Share(memory)
        self._count(size)

    # -- the connection ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.flow = Flow(transport)
        transport.write(self._response.serialize())
        self._timer.set(min(FIRST_SECONDS, self._seconds_left()), self._tick)

    def connection_lost(self, exc: Exception | None) -> None:
        self.forget()
        self._protocol.receive_eof()
        self._end()
        self.flow.resume_writing()
        self._timer.clear()
        self._timer.cancel_handle()

    def eof_received(self) -> bool:
        """Close the connection, since a client that has closed its side cannot complete the closing handshake."""
        return False

    def shutdown(self) -> None:
        """Close the connection because the server is stopping."""
        self.close(CloseCode.GOING_AWAY, "the server is stopping")

    def drain(self) -> None:
        """Tell the receiver that the server is stopping."""
        self._receiver.on_drain()

    def pause_writing(self) -> None:
        self.flow.pause_writing()
        self.flow.pause_reading("unread")

    def resume_writing(self) -> None:
        self.flow.resume_writing()
        self.flow.resume_reading("unread")

    def close(self, code: int, reason: str) -> None:
        """Send a close frame, and close the connection when the client has sent its own."""
        if self.is_open:
            self._protocol.send_close(code, reason)
            self._flush()

    def abort(self) -> None:
        """Close the connection immediately, without a close frame."""
        self.transport.abort()

    def _seconds_left(self) -> float:
        return max(0.0, self._expires_at - self._loop.time())

    def _tick(self) -> None:
        """Send a ping, unless the client has not sent a message, has sent no pongs, or its time is over.

        A client that does not read cannot send pongs. The kernel closes its connection (`http/server.py`).
        """
        if not self.is_open:
            return self.transport.abort()
        if self._seconds_left() == 0:
            self._expire()
        elif not self._has_messages:
            self.close(CloseCode.POLICY_VIOLATION, f"no message within {FIRST_SECONDS:g} s")
        elif self._num_pings == _MAX_UNANSWERED and not self.flow.write_paused:
            self.transport.abort()
        else:
            self._ping()
            self._timer.set(min(PING_SECONDS, self._seconds_left()), self._tick)

    def _ping(self) -> None:
        if not self.flow.write_paused:
            self._num_pings += 1
            self._protocol.send_ping(b"")
            self._flush()

    def _expire(self) -> None:
        """Let the receiver finish what is running, within a time limit."""
        if self._is_expired:
            return self.close(CloseCode.GOING_AWAY, "the connection has reached its maximum lifetime")
        self._is_expired = True
        self._timer.set(LAST_SECONDS, self._tick)
        self._receiver.on_expiry()

    # -- frames from the client ----------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._protocol.eof_sent:  # they are read only so that the client is not reset, and reads the close frame
            return
        is_waiting = bool(self._held or self._messages)
        self._held += data
        if len(self._held) > _MAX_HELD:
            self.flow.pause_reading("held")
        if not is_waiting:
            self._turns.soon(self._loop, self._advance, quick=len(data) <= _PIECE)

    def _advance(self) -> bool:
        """Parse the next received bytes unless messages wait, and pass one message on.

        A message may begin a request, so each takes a turn of its own. Return whether there was something to do.
        """
        if not (self._held or self._messages):
            return False
        if not self._messages:
            self._parse()
        if self._messages:
            message = self._messages.popleft()
            if not self._messages:
                self._count_held()  # the receiver counts the message now
            self._receiver.on_message(message)
        if self._held or self._messages:
            self._turns.soon(self._loop, self._advance, later=True)
        return True

    def _parse(self) -> None:
        piece = bytes(self._held[:_PIECE])
        del self._held[:_PIECE]
        self._turns.note_bytes(self._loop, len(piece))
        if self._count(BODY_MEMORY * len(piece)):
            self._protocol.receive_data(piece)
            self._receive(self._protocol.events_received())
            self._count_held()
            self._flush()
        if len(self._held) <= _MAX_HELD:
            self.flow.resume_reading("held")

    def _count_held(self) -> None:
        """Count the memory of messages, and of what has been received of the next one."""
        size = self._parts.size + len(self._protocol.reader.buffer) + sum(map(len, self._messages))
        self._memory.set(BODY_MEMORY * size)

    def _count(self, size: int) -> bool:
        """Count memory for received bytes, before they are parsed. Close the connection if too much memory is used."""
        try:
            self._memory.take(size)
        except Overloaded as error:
            self._fail(CloseCode.TRY_AGAIN_LATER, error.public)
            return False
        return True

    def _receive(self, frames: Sequence[object]) -> None:
        for frame in frames:
            if not isinstance(frame, Frame):
                continue
            if frame.opcode in _TEXT or frame.opcode is Opcode.CONT:
                self._take(frame)
            elif frame.opcode is Opcode.PONG:
                self._num_pings = 0

    def _take(self, frame: Frame) -> None:
        if not self.is_open:
            return
        if self._protocol.extensions and not self._inflated(len(frame.data)):
            return
        self._parts.add(frame)
        if len(self._parts) > _MAX_FRAGMENTS:
            return self._fail(CloseCode.POLICY_VIOLATION, f"a message may have at most {_MAX_FRAGMENTS} fragments")
        if not frame.fin:
            return
        message = self._parts.take()
        self._has_messages = True
        self._num_pings = 0
        if self._parts.is_text and not is_utf8(message):
            return self._fail(CloseCode.INVALID_DATA, "a text message is not valid UTF-8")
        self._messages.append(message)

    def _inflated(self, size: int) -> bool:
        """Count a frame that may have been compressed. Return whether there is enough memory for it."""
        self._turns.note_bytes(self._loop, size)
        return self._count(BODY_MEMORY * size)

    def _fail(self, code: int, reason: str) -> None:
        self._protocol.fail(code, reason)
        self._flush()

    # -- frames to the client ------------------------------------------------------------------------------------

    def send_text(self, data: bytes) -> None:
        """Send a message as one text frame, if the connection is open. This is the hot path, called once per token."""
        if self._protocol.state is State.OPEN:
            size = len(data)
            if size < 126:
                self.transport.write(b"\x81%c%b" % (size, data))
            elif size < 1 << 16:
                self.transport.write(b"\x81\x7e%b%b" % (size.to_bytes(2, "big"), data))
            else:
                self._protocol.send_text(data)
                self._flush()

    def send_message(self, data: bytes) -> None:
        """Send a message as text, or as binary data if it is not UTF-8."""
        if is_utf8(data):
            self.send_text(data)
        elif self.is_open:
            self._protocol.send_binary(data)
            self._flush()

    def _flush(self) -> None:
        """Write what the protocol has to send, and close the connection when it says so."""
        for data in self._protocol.data_to_send():
            if data:
                self.transport.write(data)
            elif self._protocol.close_rcvd is not None:
                self.transport.close()
            elif self.transport.can_write_eof() and not self.transport.is_closing():
                self.transport.write_eof()
        if not self.is_open:
            self._end()

    def _end(self) -> None:
        """Release what the connection holds, once, and give the client a moment for the closing handshake.

        Bytes that still arrive are read. Otherwise the kernel would reset the connection, and the client might lose the
        close frame.
        """
        if self._has_ended:
            return
        self._has_ended = True
        self._held.clear()
        self._messages.clear()
        self._parts.clear()
        self._memory.close()
        self.flow.resume_reading("held")
        self.resume_writing()
        self._timer.set(LINGER_SECONDS, self._tick)
        self._receiver.on_close()


class CompressedWebSocket(WebSocket):
    """A WebSocket whose messages may be compressed in both directions."""

    def send_text(self, data: bytes) -> None:
        if self.is_open:
            self._protocol.send_text(data)
            self._flush()


def is_utf8(data: bytes) -> bool:
    """Return whether bytes are valid UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
