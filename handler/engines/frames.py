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
            try:
                data = data[channel.send(data, socket.MSG_DONTWAIT) :]  # nearly always there is room
            except BlockingIOError:
                wait(channel, writable=True)
    except OSError as error:
        raise HostGone from error


def receive(channel: socket.socket, flags: int = 0) -> bytes:
    """What lies there, waiting for something; raises HostGone when the other end is closed."""
    try:
        data = channel.recv(1 << 16, flags)
    except BlockingIOError:
        raise
    except OSError as error:
        raise HostGone from error
    if not data:
        raise HostGone
    return data


def receive_now(channel: socket.socket) -> bytes | None:
    """What lies there, None where nothing does; raises HostGone when the other end is closed."""
    try:
        return receive(channel, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None


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
