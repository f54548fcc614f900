"""Messages on a byte stream between the handler's own processes. A message is a length in four bytes and a pickle."""

from __future__ import annotations

import pickle
import select
import socket
import struct
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct("!I")


class ChannelClosed(Exception):
    """The other end of the channel is closed."""


def wait(channel: socket.socket, *, writable: bool = False, timeout: float | None = None) -> bool:
    """Wait until `channel` is readable or writable. Return False after `timeout` seconds; None means no timeout.

    `select.select` cannot be used because it does not support file descriptors above 1023, which a busy server needs.
    """
    poll = select.poll()
    poll.register(channel, select.POLLOUT if writable else select.POLLIN)
    return bool(poll.poll(None if timeout is None else timeout * 1000))


def arrivals(channel: socket.socket) -> Callable[[float], list[tuple[int, int]]]:
    """Return a function that waits up to a number of milliseconds for bytes, and returns [] if none have arrived.

    An exception for each read without bytes would cost several times as much. A closed channel counts as readable.
    """
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    return poll.poll


def send(channel: socket.socket, message: Any) -> None:
    """Send a complete message on a blocking or non-blocking socket.

    Raises:
        ChannelClosed: the other end is closed.
    """
    send_all(channel, encode(message))


def send_all(channel: socket.socket, data: bytes | memoryview) -> None:
    """Send all of `data`, waiting until the channel accepts it.

    Raises:
        ChannelClosed: the other end is closed.
    """
    while (size := send_some(channel, data)) < len(data):  # nearly always, everything is sent at once
        data = memoryview(data)[size:]
        wait(channel, writable=True)


def send_some(channel: socket.socket, data: bytes | memoryview) -> int:
    """Send as much of `data` as possible without waiting, and return the number of bytes sent.

    Raises:
        ChannelClosed: the other end is closed.
    """
    try:
        return channel.send(data, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return 0
    except OSError as error:
        raise ChannelClosed from error


def encode(message: Any) -> bytes:
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class ChannelReader:
    """Assembles messages from bytes that arrive in pieces. If a sender dies, its incomplete message is dropped."""

    def __init__(self) -> None:
        # One buffer for all calls: allocating it each time would cost more than everything else here.
        self._buffer = memoryview(bytearray(1 << 18))
        self._rest = bytearray()  # of an incomplete message
        self._needed = 0  # minimum number of bytes that complete it

    def receive(self, channel: socket.socket, flags: int = 0) -> list[Any] | None:
        """Read once, and return the messages that are complete.

        Args:
            flags: flags of `recv`, e.g. MSG_DONTWAIT to return at once.

        Returns:
            The messages, or None if nothing has arrived and the call is non-blocking.

        Raises:
            ChannelClosed: the other end is closed, or the channel's timeout has passed.
        """
        try:
            size = channel.recv_into(self._buffer, 0, flags)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ChannelClosed from error
        if not size:
            raise ChannelClosed
        data = self._buffer
        if not self._rest and size == _LENGTH.size + _LENGTH.unpack_from(data)[0]:  # nearly always: one whole message
            return [pickle.loads(data[_LENGTH.size : size])]
        return self.feed(data[:size])

    def feed(self, data: bytes | bytearray | memoryview) -> list[Any]:
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return []
            data = self._rest
        messages = []
        start, size, head = 0, len(data), _LENGTH.size
        self._needed = head
        view = memoryview(data)  # slicing it copies nothing
        while size - start >= head:
            (length,) = _LENGTH.unpack_from(view, start)
            begin = start + head
            if size - begin < length:
                self._needed = head + length
                break
            start = begin + length
            messages.append(pickle.loads(view[begin:start]))
        self._rest = bytearray(view[start:])
        return messages


class Messages:
    """Reads a channel's messages one by one. The channel's own timeout limits each wait."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._reader = ChannelReader()
        self._queue: list[Any] = []

    def next(self) -> Any:
        """Return the next message.

        Raises:
            ChannelClosed: the other end is closed, or no message arrives in time.
        """
        while not self._queue:
            self._queue = self._reader.receive(self._channel) or []
        return self._queue.pop(0)
