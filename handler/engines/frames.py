"""Messages on a byte stream: four bytes of length, then a pickle. Both ends are our own processes."""

from __future__ import annotations

import pickle
import select
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!I")


class HostGone(Exception):
    """The other end of the channel is closed."""


def wait(channel: socket.socket, *, writable: bool = False, timeout: float | None = None) -> bool:
    """Whether `channel` can be read (or written) within `timeout` seconds; None waits for ever.

    Not `select.select`: a server with a thousand clients has file descriptors that it cannot name.
    """
    poll = select.poll()
    poll.register(channel, select.POLLOUT if writable else select.POLLIN)
    return bool(poll.poll(None if timeout is None else timeout * 1000))


def send(channel: socket.socket, message: Any) -> None:
    """Send a whole message, whether the socket blocks or not: an event loop that reads from it makes it not to."""
    data = memoryview(encode(message))
    try:
        while data:
            wait(channel, writable=True)
            data = data[channel.send(data) :]
    except OSError as error:
        raise HostGone from error


def receive(channel: socket.socket) -> bytes:
    """What lies there, waiting for something; raises HostGone when the other end is closed."""
    try:
        data = channel.recv(1 << 16)
    except OSError as error:
        raise HostGone from error
    if not data:
        raise HostGone
    return data


def encode(message: Any) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Bytes in any pieces in, whole messages out; a message that is cut off by the sender's death never appears."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        self._buffer += data
        messages = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            end = start + _LENGTH.size + _LENGTH.unpack_from(self._buffer, start)[0]
            if len(self._buffer) < end:
                break
            messages.append(pickle.loads(memoryview(self._buffer)[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return messages


class Messages:
    """What comes on a channel, one at a time, waited for as long as the channel's own timeout says."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._reader = FrameReader()
        self._found: list[Any] = []

    def next(self) -> Any:
        """Raises HostGone when there will be none, or none in time."""
        while not self._found:
            self._found = self._reader.feed(receive(self._channel))
        return self._found.pop(0)
