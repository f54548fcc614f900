"""A WebSocket connection, which takes over the transport of the HTTP connection that it began on."""

from __future__ import annotations

import asyncio
import functools
import struct
from collections.abc import Sequence

from websockets.frames import CloseCode, Opcode
from websockets.protocol import State
from websockets.server import ServerProtocol

from handler.http.exchange import ConnectionFlow, Successor
from handler.http.protocol import LINGER_SECONDS, LoopTurns, Timer
from handler.http.sockets.base import STOPPING, Lifetime, Receiver, SocketLimits, is_utf8
from handler.http.sockets.handshake import Handshake, library_log
from handler.http.sockets.parser import MessageParser
from handler.serving.quota import Quota

PING_SECONDS = 25.0  # seconds between two pings, which detect that a client has gone
_MAX_UNANSWERED = 2  # pings without a pong, after which the client counts as gone
_WHOLE_TEXT = 0x80 | Opcode.TEXT.value  # the first byte of a text frame that is a complete message
_SMALL = 1024  # size from which heads of frames are not cached


def _text_head(size: int) -> bytes:
    """Return the bytes before the payload in a text frame that is a complete message. See RFC 6455, section 5.2."""
    if size < 126:
        return struct.pack(">BB", _WHOLE_TEXT, size)
    if size < 1 << 16:
        return struct.pack(">BBH", _WHOLE_TEXT, 126, size)
    return struct.pack(">BBQ", _WHOLE_TEXT, 127, size)


@functools.cache
def _text_heads() -> list[bytes]:
    """Return the heads of small frames by their sizes. They use 40 KiB once there has been a connection."""
    return [_text_head(size) for size in range(_SMALL)]


class WebSocket(Successor):
    """An open WebSocket connection. It is read while requests are running, so that pings get pongs.

    It is not read while the client does not read, because unsent pongs and responses would then use more and more
    memory.

    Args:
        handshake: handshake that accepts the connection.
        turns: turns that the connections of the server share.
        memory: quota in which a message is counted while it is received.

    Attributes:
        flow: flow control, set by `connection_made`.
        num_running: number of requests that share the buffer of unsent bytes.
        write_paused: whether the client accepts no more data. It has the value in `flow`, which is slower to read.
    """

    flow: ConnectionFlow
    transport: asyncio.Transport
    _receiver: Receiver

    def __init__(
        self,
        handshake: Handshake,
        turns: LoopTurns,
        memory: Quota,
        limits: SocketLimits,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        loop = loop or asyncio.get_running_loop()
        # The attributes that `send_text` reads come first, so that they share a cache line.
        self._has_ended = False
        self._heads = _text_heads()
        self.write_paused = False
        self._response = handshake.response
        self._protocol = ServerProtocol(state=State.OPEN, max_size=limits.message, logger=library_log)
        self._protocol.extensions = [*handshake.extensions]
        self._parser = MessageParser(self, self._protocol, turns, memory, loop)
        self._lifetime = Lifetime(limits.seconds, loop)
        self._timer = Timer(loop)
        self._leave = functools.partial(turns.leave, loop)
        self._num_pings = 0  # pings of the server without a pong
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
        self._parser.count_in(memory)

    # -- the connection ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.flow = ConnectionFlow(transport)
        transport.write(self._response.serialize())
        self._timer.set(self._lifetime.seconds_left(), self._tick)

    def connection_lost(self, exc: Exception | None) -> None:
        self.forget()
        self._protocol.receive_eof()
        self._end()
        self.resume_writing()
        self._timer.clear()
        self._timer.cancel_handle()

    def eof_received(self) -> bool:
        """Close the connection, since a client that has closed its side cannot complete the closing handshake."""
        is_tls = self.transport.get_extra_info("sslcontext") is not None
        return not is_tls and self._leave(self.transport)

    def shutdown(self) -> None:
        """Close the connection because the server is stopping."""
        self.close(CloseCode.GOING_AWAY, STOPPING)

    def drain(self) -> None:
        """Tell the receiver that the server is stopping."""
        self._receiver.on_drain()

    def pause_writing(self) -> None:
        self.write_paused = True
        self.flow.pause_writing()
        self.flow.pause_reading("unread")

    def resume_writing(self) -> None:
        self.write_paused = False
        self.flow.resume_writing()
        self.flow.resume_reading("unread")

    def close(self, code: int, reason: str) -> None:
        """Send a close frame, and close the connection when the client has sent its own."""
        if self.is_open:
            self._protocol.send_close(code, reason)
            self.flush()

    def abort(self) -> None:
        """Close the connection immediately, without a close frame."""
        self.transport.abort()

    def _tick(self) -> None:
        """Check the lifetime of the connection, and send a ping, unless the client has sent no pongs.

        A client that does not read cannot send pongs. The kernel closes its connection (`http/server.py`).
        """
        if not self.is_open:
            return self.transport.abort()
        self._lifetime.check(self, self._receiver)
        if not self.is_open:
            return
        if self._num_pings == _MAX_UNANSWERED and not self.flow.write_paused:
            return self.transport.abort()
        self._timer.set(min(PING_SECONDS, self._lifetime.seconds_left()), self._tick)
        self._ping()

    def _ping(self) -> None:
        if not self.flow.write_paused:
            self._num_pings += 1
            self._protocol.send_ping(b"")
            self.flush()

    # -- frames from the client ----------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if not self._protocol.eof_sent:  # later bytes are read only so that the client receives the close frame
            self._parser.add(data)

    def on_message(self, message: bytes) -> None:
        self._lifetime.has_messages = True
        self._num_pings = 0
        self._receiver.on_message(message)

    def on_pong(self) -> None:
        self._num_pings = 0

    # -- frames to the client ------------------------------------------------------------------------------------

    def send_text(self, data: bytes) -> None:
        """Send a message as one text frame, if the connection is open. This is the hot path, called once per token."""
        if not self._has_ended:
            size = len(data)
            head = self._heads[size] if size < _SMALL else _text_head(size)
            self.transport.write(head + data)

    def send_texts(self, messages: Sequence[bytes]) -> None:
        """Send messages as text frames with one write, since each write is a system call."""
        if not self._has_ended:
            heads = self._heads
            try:
                frames = [heads[len(message)] + message for message in messages]
            except IndexError:
                frames = [_text_head(len(message)) + message for message in messages]
            self.transport.write(b"".join(frames))

    def send_message(self, data: bytes) -> None:
        """Send a message as text, or as binary data if it is not UTF-8."""
        if is_utf8(data):
            self.send_text(data)
        elif self.is_open:
            self._protocol.send_binary(data)
            self.flush()

    def flush(self) -> None:
        """Write the bytes that the protocol has to send, and close the connection when it requires it."""
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
        """Release the resources of the connection once, and give the client a moment for the closing handshake.

        Incoming bytes are still read. Otherwise, the kernel would reset the connection, and the client might lose the
        close frame.
        """
        if self._has_ended:
            return
        self._has_ended = True
        self._parser.close()
        self.resume_writing()
        self._timer.set(LINGER_SECONDS, self._tick)
        self._receiver.on_close()


class CompressedWebSocket(WebSocket):
    """A WebSocket whose messages may be compressed in both directions."""

    def send_text(self, data: bytes) -> None:
        if self.is_open:
            self._protocol.send_text(data)
            self.flush()

    def send_texts(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            self.send_text(message)
