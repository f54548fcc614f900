"""The front end's side of vLLM's protocol with an engine core."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

_TIMEOUT = 20_000  # milliseconds
_ADD, _ABORT, _UTILITY = b"\x00", b"\x01", b"\x03"
_pack = msgspec.msgpack.encode


class Front:
    """Sockets to one core."""

    def __init__(self, handshake: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._handshake = self._bind(zmq.ROUTER, handshake)
        self.address = _address(self._handshake)
        self._input = self._bind(zmq.ROUTER)
        self._output = self._bind(zmq.PULL)

    def _bind(self, kind: int, address: str = "tcp://127.0.0.1:*") -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.rcvtimeo = _TIMEOUT
        socket.bind(address)
        return socket

    def close(self) -> None:
        self._context.destroy(linger=0)

    def shake_hands(self) -> dict[str, Any]:
        """Return what the core says of itself."""
        self._core, hello = self._handshake.recv_multipart()
        assert msgspec.msgpack.decode(hello)["status"] == "HELLO"
        ends = {"inputs": [_address(self._input)], "outputs": [_address(self._output)]}
        self._handshake.send_multipart([self._core, _pack({"addresses": ends, "parallel_config": {}})])
        ready = self._input.recv_multipart()[1]
        assert msgspec.msgpack.decode(self._handshake.recv_multipart()[1])["status"] == "READY"
        found: dict[str, Any] = msgspec.msgpack.decode(ready)
        return found

    def add(self, id: str, tokens: int) -> None:
        sampling = {"temperature": 0.0, "max_tokens": tokens, "stop_token_ids": []}
        self._send(_ADD, [id, [1, 2, 3], None, sampling, None, 0.0])

    def abort(self, *ids: str) -> None:
        self._send(_ABORT, ids)

    def call(self, number: int, method: str) -> None:
        self._send(_UTILITY, [0, number, method, []])

    def _send(self, kind: bytes, message: Any) -> None:
        self._input.send_multipart([self._core, kind, _pack(message)])

    def message(self) -> list[Any]:
        found: list[Any] = msgspec.msgpack.decode(self._output.recv())
        return found

    def outputs(self) -> list[list[Any]]:
        """Wait for a step with tokens."""
        while True:
            if outputs := self.message()[1]:
                return list(outputs)


def _address(socket: zmq.Socket[bytes]) -> str:
    """Where it is bound."""
    found = socket.last_endpoint
    assert isinstance(found, bytes)
    return found.decode()
