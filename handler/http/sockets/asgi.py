"""WebSockets of other ASGI servers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from starlette.types import Message, Receive, Scope, Send
from websockets.frames import CloseCode

from handler.http.exchange import WriteFlow
from handler.http.protocol import LINGER_SECONDS
from handler.http.sockets.connection import FIRST_SECONDS, LAST_SECONDS, Limits, Receiver, choose_subprotocol, is_utf8
from handler.serving.quota import Quota

_MAX_UNSENT = 1 << 16  # bytes that wait for the server; beyond it, requests wait
_RESPONSES = "websocket.http.response"
"""The ASGI extension that lets an application refuse a WebSocket with a response of its choice."""


class AsgiSocket:
    """A WebSocket of another ASGI server, which sends pings and checks frames itself. It implements `Socket`.

    It is the exchange of the request that opens the WebSocket. One task reads, and another one sends.

    Args:
        scope: ASGI scope of the WebSocket.
    """

    memo: dict[object, Any] | None = None  # the server tells no head from another
    _receiver: Receiver

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._offered = scope.get("subprotocols", ())
        self._has_responses = _RESPONSES in (scope.get("extensions") or {})
        self._unsent = deque[Message]()
        self._filled = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._expires_at = 0.0
        self._has_messages = False
        self.flow = WriteFlow()
        self.is_open = False
        self.num_running = 0
        self.num_unsent = 0

    # -- the connection ------------------------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        """Send a message of the response that refuses the WebSocket. Servers without the extension respond with 403."""
        if self._has_responses:
            await self._send({**message, "type": f"websocket.{message['type']}"})
        elif message["type"] == "http.response.start":
            await self._send({"type": "websocket.close", "code": CloseCode.POLICY_VIOLATION})

    async def accept(self, limits: Limits) -> None:
        """Open the WebSocket. Messages are read when it is served."""
        await self._send({"type": "websocket.accept", "subprotocol": choose_subprotocol(self._offered)})
        self.is_open = True
        loop = asyncio.get_running_loop()
        self._expires_at = loop.time() + limits.seconds
        self._timer = loop.call_later(min(FIRST_SECONDS, limits.seconds), self._check_first)
        self._tasks = [asyncio.ensure_future(self._write()), asyncio.ensure_future(self._read(limits.message))]

    def serve(self, receiver: Receiver, memory: Quota) -> None:
        """Pass the messages of the client to a receiver. The server has already received each of them whole."""
        self._receiver = receiver

    async def finish(self) -> None:
        """Send what is unsent, within a time limit, and end the tasks."""
        if self._tasks:
            await asyncio.wait(self._tasks[:1], timeout=LINGER_SECONDS)
        for task in self._tasks:
            task.cancel()

    def close(self, code: int, reason: str) -> None:
        if self.is_open:
            self._unsent.append({"type": "websocket.close", "code": int(code), "reason": reason})
            self._filled.set()
            self._end()

    def shutdown(self) -> None:
        self.close(CloseCode.GOING_AWAY, "the server is stopping")

    def abort(self) -> None:
        self._unsent.clear()
        for task in self._tasks:
            task.cancel()
        self._end()

    def _check_first(self) -> None:
        """Close the connection if the client has not sent a message. Set the timer for its maximum lifetime."""
        loop = asyncio.get_running_loop()
        if self._has_messages or loop.time() >= self._expires_at:
            self._timer = loop.call_at(self._expires_at, self._expire)
        else:
            self.close(CloseCode.POLICY_VIOLATION, f"no message within {FIRST_SECONDS:g} s")

    def _expire(self) -> None:
        """Let the receiver finish what is running, within a time limit."""
        loop = asyncio.get_running_loop()
        reason = "the connection has reached its maximum lifetime"
        self._timer = loop.call_later(LAST_SECONDS, self.close, CloseCode.GOING_AWAY, reason)
        self._receiver.on_expiry()

    def _end(self) -> None:
        if not self.is_open:
            return
        self.is_open = False
        self.flow.resume_writing()
        if self._timer is not None:
            self._timer.cancel()
        self._receiver.on_close()

    # -- messages ------------------------------------------------------------------------------------------------

    async def _read(self, limit: int) -> None:
        while (message := await self._receive())["type"] == "websocket.receive":
            text = message.get("text")
            data = message["bytes"] if text is None else text.encode()
            self._has_messages = True
            if not self.is_open:
                continue
            if len(data) > limit:
                self.close(CloseCode.MESSAGE_TOO_BIG, f"a message may have at most {limit} bytes")
            else:
                self._receiver.on_message(data)
        self._unsent.clear()
        self._filled.set()
        self._end()

    def send_text(self, data: bytes) -> None:
        self._add({"type": "websocket.send", "text": data.decode()}, len(data))

    def send_message(self, data: bytes) -> None:
        if is_utf8(data):
            self.send_text(data)
        else:
            self._add({"type": "websocket.send", "bytes": data}, len(data))

    def send_texts(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            self.send_text(message)

    def _add(self, message: Message, size: int) -> None:
        if not self.is_open:
            return
        self._unsent.append(message)
        self._filled.set()
        self.num_unsent += size
        if self.num_unsent > _MAX_UNSENT:
            self.flow.pause_writing()

    async def _write(self) -> None:
        """Send messages until the connection is closed."""
        while self.is_open or self._unsent:
            if not self._unsent:
                self._filled.clear()
                await self._filled.wait()
                continue
            message = self._unsent.popleft()
            try:
                await self._send(message)
            except Exception:  # servers raise different exceptions after a disconnect
                return self.abort()
            self.num_unsent -= len(message.get("bytes") or message.get("text", "").encode())
            if self.num_unsent <= _MAX_UNSENT:
                self.flow.resume_writing()


def http_scope(scope: Scope) -> Scope:
    """Return the scope of a WebSocket as that of the request of HTTP/1.1 that opens it."""
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"upgrade"]
    return {
        **scope,
        "type": "http",
        "method": "GET",
        "http_version": "1.1",
        "scheme": {"ws": "http", "wss": "https"}.get(scope.get("scheme", "ws"), "http"),
        "headers": [*headers, (b"upgrade", b"websocket")],
    }
