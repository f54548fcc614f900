"""A stand-in for vLLM's Rust front end: its arguments, its side of the handshake, chats as streams.

python rust_front_end.py serve MODEL --port PORT --data-parallel-rpc-port PORT ...
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import zmq

_WITH_CHUNKS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Requests:
    """Gives each token that the core brings to the handler of its request."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._queues: dict[str, queue.SimpleQueue[bool]] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def add(self, tokens: int) -> queue.SimpleQueue[bool]:
        """Return the queue of a new request: an item for each token, true for the last."""
        with self._lock:
            id = str(next(self._numbers))
            self._queues[id] = queue.SimpleQueue()
            self._front.add(id, tokens)
            return self._queues[id]

    def _read(self) -> None:
        while True:
            for output in self._front.outputs():
                self._queues[output[0]].put(len(output) > 2)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    requests: Requests

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        tokens = self.requests.add(body["max_tokens"])
        if body["stream"]:
            self.wfile.write(_WITH_CHUNKS)
            self._event({"role": "assistant"}, None)
            while not tokens.get():
                self._event({"content": " word"}, None)
            self._event({"content": " word"}, "length")
            self.wfile.write(b"0\r\n\r\n")
        else:
            while not tokens.get():
                pass
            answer = json.dumps({"choices": [{"finish_reason": "length"}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    def _event(self, delta: dict[str, str], finish: str | None) -> None:
        event = f"data: {json.dumps({'choices': [{'delta': delta, 'finish_reason': finish}]})}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--port", type=int)
    parser.add_argument("--data-parallel-rpc-port", type=int)
    given = parser.parse_known_args()[0]
    front = Front(f"tcp://127.0.0.1:{given.data_parallel_rpc_port}")
    front.shake_hands()
    Handler.requests = Requests(front)
    ThreadingHTTPServer(("127.0.0.1", given.port), Handler).serve_forever()


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


if __name__ == "__main__":
    main()
