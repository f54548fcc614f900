"""Records the messages that clients send over WebSockets: a relay of bytes before a server."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Any

from websockets.frames import DATA_OPCODES, Frame
from websockets.protocol import State
from websockets.server import ServerProtocol

from tests.servers import LiveServer

_PIECE = 1 << 16


class Recorder(LiveServer):
    """The messages of the WebSockets that have gone through it.

    Args:
        port: of the server.
        tls: with which clients connect. The server is reached without it.

    Attributes:
        url: of the relay.
        sessions: the JSON messages of each WebSocket, in the order of opening.
    """

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        super().__init__()
        self._target, self._tls = port, tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open = contextlib.ExitStack()
        self.sessions: list[list[Any]] = []
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        self._open.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                threading.Thread(target=self._relay, args=(self._listener.accept()[0],), daemon=True).start()

    def _relay(self, accepted: socket.socket) -> None:
        with contextlib.suppress(OSError):
            client = self._tls.wrap_socket(accepted, server_side=True) if self._tls else accepted
            server = socket.create_connection(("127.0.0.1", self._target))
            self._open.callback(client.close)
            self._open.callback(server.close)
            back = threading.Thread(target=_copy, args=(server, client), daemon=True)
            back.start()
            self._forward(client, server)
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_WR)
            back.join()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        head, messages = b"", None
        while data := client.recv(_PIECE):
            server.sendall(data)
            if messages is None:
                head += data
                start, end, rest = head.partition(b"\r\n\r\n")
                if end and b"\nupgrade: websocket" in start.lower():
                    self.sessions.append([])
                    messages = _Messages(self.sessions[-1])
                    messages.receive(rest)
            else:
                messages.receive(data)


class _Messages:
    """Adds the whole messages among frames to a list."""

    def __init__(self, found: list[Any]) -> None:
        self._protocol = ServerProtocol(state=State.OPEN, max_size=None)
        self._found, self._parts = found, b""

    def receive(self, data: bytes) -> None:
        self._protocol.receive_data(data)
        for frame in self._protocol.events_received():
            assert isinstance(frame, Frame)
            if frame.opcode in DATA_OPCODES:
                self._parts += frame.data
                if frame.fin:
                    self._found.append(json.loads(self._parts))
                    self._parts = b""


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_PIECE):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def recording(port: int, tls: ssl.SSLContext | None = None) -> Iterator[Recorder]:
    with contextlib.closing(Recorder(port, tls)) as recorder:
        yield recorder
