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

from tests.bench.front import Front

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


if __name__ == "__main__":
    main()
