"""A WebSocket client of the server under test, on the `websockets` package and on bare frames."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.servers import LiveServer

SECONDS = 20.0
KEY = "dGhlIHNhbXBsZSBub25jZQ=="


def open_socket(server: LiveServer, path: str, **options: Any) -> ClientConnection:
    url = server.url.replace("http", "ws", 1) + path
    connection: ClientConnection = connect(url, open_timeout=SECONDS, max_size=None, **options)
    return connection


def send(connection: ClientConnection, *events: Any) -> None:
    for event in events:
        connection.send(json.dumps(event))


def receive(connection: ClientConnection) -> Any:
    return json.loads(connection.recv(SECONDS))


def until(connection: ClientConnection, *kinds: str) -> list[Any]:
    """The events up to the first one of these types."""
    events = [receive(connection)]
    while events[-1]["type"] not in kinds:
        events.append(receive(connection))
    return events


def frame(opcode: int, data: bytes = b"", *, first: int = 0x80, masked: bool = True) -> bytes:
    """A frame whose first byte has these bits besides the opcode."""
    size = len(data)
    head = bytes([first | opcode])
    mask = 0x80 if masked else 0
    if size < 126:
        head += bytes([mask | size])
    else:
        head += bytes([mask | 127]) + struct.pack("!Q", size)
    return head + (bytes(4) if masked else b"") + data  # a mask of zeros changes nothing


class Wire:
    """One connection after its handshake, byte by byte."""

    def __init__(self, connection: socket.socket, rest: bytes = b"") -> None:
        self.socket = connection
        self._rest = rest

    def frame(self, opcode: int, data: bytes = b"", *, first: int = 0x80, masked: bool = True) -> None:
        """Send a frame whose first byte has these bits besides the opcode."""
        self.socket.sendall(frame(opcode, data, first=first, masked=masked))

    def read(self) -> tuple[int, bytes]:
        """The next frame: its first byte and its data. (0, b"") at the end of the connection."""
        try:
            first, length = self._take(2)
            if length == 126:
                length = int.from_bytes(self._take(2), "big")
            elif length == 127:
                length = int.from_bytes(self._take(8), "big")
            return first, self._take(length)
        except (EOFError, ConnectionError):
            return 0, b""

    def close_code(self) -> int:
        """The code of the close frame, which must come next, with the end of the connection behind it."""
        first, data = self.read()
        assert first == 0x88, (first, data)
        self.frame(8, data[:2])
        assert self.read() == (0, b"")
        return int.from_bytes(data[:2], "big")

    def _take(self, size: int) -> bytes:
        while len(self._rest) < size:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._rest += data
        data, self._rest = self._rest[:size], self._rest[size:]
        return data


def offer(path: str, headers: Sequence[str] = ()) -> bytes:
    lines = [
        f"GET {path} HTTP/1.1", "Host: localhost", "Connection: Upgrade", "Upgrade: websocket",
        f"Sec-WebSocket-Key: {KEY}", "Sec-WebSocket-Version: 13", *headers, "", "",
    ]  # fmt: skip
    return "\r\n".join(lines).encode()


@contextlib.contextmanager
def wire(
    server: LiveServer, path: str = "/invocations-bidirectional-stream", headers: Sequence[str] = ()
) -> Iterator[Wire]:
    with socket.create_connection(("127.0.0.1", server.port), SECONDS) as connection:
        connection.sendall(offer(path, headers))
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(1 << 16)
        assert head.startswith(b"HTTP/1.1 101 "), head
        yield Wire(connection, head.partition(b"\r\n\r\n")[2])
