"""Messages on a byte stream: four bytes of length, then a pickle. Both ends are our own processes."""

from __future__ import annotations

import pickle
import select
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!I")


class ChannelClosed(Exception):
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
    data: bytes | memoryview = encode(message)
    try:
        while True:
            try:
                sent = channel.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                wait(channel, writable=True)
                continue
            if sent == len(data):  # nearly always there is room
                return
            data = memoryview(data)[sent:]
    except OSError as error:
        raise ChannelClosed from error


def encode(message: Any) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class MessageReader:
    """Bytes in any pieces in, whole messages out; a message that is cut off by the sender's death never appears."""

    def __init__(self) -> None:
        # Kept: to make and give back as much at each call costs the allocator more than all that is done with it.
        self._room = memoryview(bytearray(1 << 16))
        self._rest = bytearray()  # of a message that has not come whole
        self._wanted = 0  # bytes that it has at least

    def receive(self, channel: socket.socket, flags: int = 0) -> list[Any] | None:
        """What came whole with what lies in the channel; None where nothing does and the call must not wait.

        Raises:
            ChannelClosed: the other end is closed.
        """
        try:
            size = channel.recv_into(self._room, 0, flags)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ChannelClosed from error
        if not size:
            raise ChannelClosed
        room = self._room
        if not self._rest and size == _LENGTH.size + _LENGTH.unpack_from(room)[0]:  # nearly always: one, and whole
            return [pickle.loads(room[_LENGTH.size : size])]
        return self.feed(room[:size])

    def feed(self, data: bytes | bytearray | memoryview) -> list[Any]:
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return []
            data = self._rest
        messages = []
        start, size = 0, len(data)
        self._wanted = _LENGTH.size
        view = memoryview(data)  # slices of it are no copies
        while size - start >= _LENGTH.size:
            end = start + _LENGTH.size + _LENGTH.unpack_from(view, start)[0]
            if size < end:
                self._wanted = end - start
                break
            messages.append(pickle.loads(view[start + _LENGTH.size : end]))
            start = end
        self._rest = bytearray(view[start:])
        return messages


class Messages:
    """What comes on a channel, one at a time, waited for as long as the channel's own timeout says."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._reader = MessageReader()
        self._found: list[Any] = []

    def next(self) -> Any:
        """Raises ChannelClosed when there will be none, or none in time."""
        while not self._found:
            self._found = self._reader.receive(self._channel) or []
        return self._found.pop(0)
