"""WebSockets of other ASGI servers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from starlette.types import Message, Receive, Scope, Send
from websockets.frames import CloseCode

from handler.http.exchange import AnyExchange, WriteFlow
from handler.http.protocol import LINGER_SECONDS
from handler.http.sockets.base import STOPPING, Lifetime, Receiver, SocketLimits, is_utf8
from handler.http.sockets.handshake import choose_subprotocol
from handler.serving.quota import Quota

_MAX_UNSENT = 1 << 16  # maximum bytes to queue for the server before requests must wait
_RESPONSES = "websocket.http.response"
"""The ASGI extension that lets an application refuse a WebSocket with a response of its choice."""


class AsgiHandshake(AnyExchange):
    """The exchange of a request that opens a WebSocket of another ASGI server.

    Args:
        scope: scope of the WebSocket.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__()
        self._receive = receive
        self._send = send
        self._offered = scope.get("subprotocols", ())
        self._has_responses = _RESPONSES in (scope.get("extensions") or {})
        self._socket: AsgiSocket | None = None

    async def send(self, message: Message) -> None:
        """Send a message of the response that refuses the WebSocket. Servers without the extension respond with 403."""
        if self._has_responses:
            await self._send({**message, "type": f"websocket.{message['type']}"})
        elif message["type"] == "http.response.start":
            await self._send({"type": "websocket.close", "code": CloseCode.POLICY_VIOLATION})

    async def accept(self, limits: SocketLimits) -> AsgiSocket:
        """Open the WebSocket. Its messages are read when it is served."""
        await self._send({"type": "websocket.accept", "subprotocol": choose_subprotocol(self._offered)})
        self._socket = AsgiSocket(self._receive, self._send, limits)
        return self._socket

    async def finish(self) -> None:
        """End the WebSocket, if it has been opened."""
        if self._socket is not None:
            await self._socket.finish()


class _Outbox:
    """The messages that wait for the server, which it sends one at a time.

    Attributes:
        size: total size of the messages, in bytes.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._messages = deque[tuple[Message, int]]()
        self._filled = asyncio.Event()
        self._is_closed = False
        self.flow = WriteFlow()
        self.size = 0

    def add(self, message: Message, size: int) -> None:
        if self._is_closed:
            return
        self._messages.append((message, size))
        self._filled.set()
        self.size += size
        if self.size > _MAX_UNSENT:
            self.flow.pause_writing()

    def close(self) -> None:
        """Accept no more messages. Queued messages are still sent."""
        self._is_closed = True
        self._filled.set()
        self.flow.resume_writing()

    def clear(self) -> None:
        self._messages.clear()

    async def run(self) -> None:
        """Send messages until the outbox is closed and empty.

        Raises:
            Exception: the server could not send a message. Servers raise different exceptions after a disconnect.
        """
        while self._messages or not self._is_closed:
            if not self._messages:
                self._filled.clear()
                await self._filled.wait()
                continue
            message, size = self._messages.popleft()
            await self._send(message)
            self.size -= size
            if self.size <= _MAX_UNSENT:
                self.flow.resume_writing()


class AsgiSocket:
    """A WebSocket of another ASGI server, which sends pings and checks frames itself. It implements `Socket`.

    One task reads, and another one sends.
    """

    _receiver: Receiver

    def __init__(self, receive: Receive, send: Send, limits: SocketLimits) -> None:
        loop = asyncio.get_running_loop()
        self._receive = receive
        self._outbox = _Outbox(send)
        self._lifetime = Lifetime(limits.seconds, loop)
        self._timer = loop.call_later(self._lifetime.seconds_left(), self._check)
        self._writer = asyncio.ensure_future(self._write())
        self._reader = asyncio.ensure_future(self._read(limits.message))
        self.is_open = True
        self.num_running = 0

    @property
    def flow(self) -> WriteFlow:
        return self._outbox.flow

    @property
    def write_paused(self) -> bool:
        return self._outbox.flow.write_paused

    @property
    def num_unsent(self) -> int:
        return self._outbox.size

    # -- the connection ------------------------------------------------------------------------------------------

    def serve(self, receiver: Receiver, memory: Quota) -> None:
        """Pass the messages of the client to a receiver. The server has already received them completely."""
        self._receiver = receiver

    async def finish(self) -> None:
        """Send the remaining messages within a time limit, and end the tasks."""
        await asyncio.wait([self._writer], timeout=LINGER_SECONDS)
        self._cancel()

    def close(self, code: int, reason: str) -> None:
        if self.is_open:
            self._outbox.add({"type": "websocket.close", "code": int(code), "reason": reason}, 0)
            self._end()

    def shutdown(self) -> None:
        self.close(CloseCode.GOING_AWAY, STOPPING)

    def abort(self) -> None:
        self._outbox.clear()
        self._cancel()
        self._end()

    def _cancel(self) -> None:
        self._writer.cancel()
        self._reader.cancel()

    def _check(self) -> None:
        """Check the lifetime of the connection."""
        self._lifetime.check(self, self._receiver)
        if self.is_open:
            seconds = self._lifetime.seconds_left()
            self._timer = asyncio.get_running_loop().call_later(seconds, self._check)

    def _end(self) -> None:
        if not self.is_open:
            return
        self.is_open = False
        self._outbox.close()
        self._timer.cancel()
        self._receiver.on_close()

    # -- messages ------------------------------------------------------------------------------------------------

    async def _read(self, limit: int) -> None:
        while (message := await self._receive())["type"] == "websocket.receive":
            text = message.get("text")
            data = message["bytes"] if text is None else text.encode()
            self._lifetime.has_messages = True
            if not self.is_open:
                continue
            if len(data) > limit:
                self.close(CloseCode.MESSAGE_TOO_BIG, f"a message may have at most {limit} bytes")
            else:
                self._receiver.on_message(data)
        self._outbox.clear()
        self._end()

    def send_text(self, data: bytes) -> None:
        self._outbox.add({"type": "websocket.send", "text": data.decode()}, len(data))

    def send_message(self, data: bytes) -> None:
        if is_utf8(data):
            self.send_text(data)
        else:
            self._outbox.add({"type": "websocket.send", "bytes": data}, len(data))

    def send_texts(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            self.send_text(message)

    async def _write(self) -> None:
        try:
            await self._outbox.run()
        except Exception:  # servers raise different exceptions after a disconnect
            self.abort()


def http_scope(scope: Scope) -> Scope:
    """Return the scope of the HTTP/1.1 request that opens a WebSocket."""
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"upgrade"]
    return {
        **scope,
        "type": "http",
        "method": "GET",
        "http_version": "1.1",
        "scheme": {"ws": "http", "wss": "https"}.get(scope.get("scheme", "ws"), "http"),
        "headers": [*headers, (b"upgrade", b"websocket")],
    }
