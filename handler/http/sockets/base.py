"""The interface, limits and lifetime of all WebSockets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from websockets.frames import CloseCode

from handler.http.exchange import WriteFlow
from handler.serving.quota import Quota

FIRST_SECONDS = 60.0  # maximum seconds until the first message
LAST_SECONDS = 60.0  # seconds that running responses have left when a connection reaches its maximum lifetime
STOPPING = "the server is stopping"
EXPIRED = "the connection has reached its maximum lifetime (option.websockets_seconds)"


class SocketLimits(NamedTuple):
    """The limits of a WebSocket.

    Attributes:
        message: maximum size of a message, in bytes.
        seconds: maximum lifetime of the connection, in seconds.
    """

    message: int
    seconds: float


class Receiver(Protocol):
    """Receives the messages and the events of a connection."""

    def on_message(self, message: bytes) -> None:
        """A message is complete. Binary messages are not distinguished from text."""

    def on_expiry(self) -> None:
        """The maximum lifetime of the connection has been reached."""

    def on_drain(self) -> None:
        """The server is stopping."""

    def on_close(self) -> None:
        """The connection is closed or is being closed, so no more can be sent. This is called once."""


class Socket(Protocol):
    """An open WebSocket, as the requests on it use it.

    Attributes:
        num_running: number of requests that share the buffer of unsent bytes.
    """

    num_running: int

    @property
    def flow(self) -> WriteFlow:
        """Return the flow control of sent messages."""

    @property
    def write_paused(self) -> bool:
        """Return whether the client accepts no more data, as the flow control does. This is read once per token."""

    @property
    def is_open(self) -> bool:
        """Return whether messages can be sent."""

    @property
    def num_unsent(self) -> int:
        """Return the number of bytes that have not been passed to the client's connection yet."""

    def serve(self, receiver: Receiver, memory: Quota) -> None:
        """Pass the messages of the client to a receiver, and count them in a quota while they are received."""

    def send_text(self, data: bytes) -> None:
        """Send a message as one text frame, if the connection is open."""

    def send_message(self, data: bytes) -> None:
        """Send a message as text, or as binary data if it is not UTF-8."""

    def send_texts(self, messages: Sequence[bytes]) -> None:
        """Send messages as text frames, if the connection is open."""

    def close(self, code: int, reason: str) -> None:
        """Send a close frame, if the connection is open."""

    def shutdown(self) -> None:
        """Close the connection because the server is stopping."""

    def abort(self) -> None:
        """Close the connection immediately, without a close frame."""


class Lifetime:
    """Limits how long a connection waits for its first message, and how long it stays open.

    The owner calls `check` at least every `seconds_left` seconds.

    Args:
        seconds: maximum lifetime of the connection, in seconds.

    Attributes:
        has_messages: whether the client has sent a message. The owner sets it.
    """

    def __init__(self, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ends_at = loop.time() + seconds
        self._is_expired = False
        self.has_messages = False

    def seconds_left(self) -> float:
        """Return the seconds until the next check is due."""
        left = max(0.0, self._ends_at - self._loop.time())
        return left if self.has_messages else min(FIRST_SECONDS, left)

    def check(self, socket: Socket, receiver: Receiver) -> None:
        """Close the connection, or announce the end of its lifetime to the receiver, if a limit has been reached."""
        if self._loop.time() < self._ends_at:
            if not (self.has_messages or self._is_expired):
                socket.close(CloseCode.POLICY_VIOLATION, f"no message within {FIRST_SECONDS:g} s")
        elif self._is_expired:
            socket.close(CloseCode.GOING_AWAY, EXPIRED)
        else:
            self._is_expired = True
            self._ends_at = self._loop.time() + LAST_SECONDS
            receiver.on_expiry()


def is_utf8(data: bytes) -> bool:
    """Return whether bytes are valid UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
