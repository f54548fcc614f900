"""Stands in for `vllm serve`: its health and completions routes, with a child that is named as vLLM's core.

python completions_server.py PORT TOGETHER [apart]      # TOGETHER: tokens in an event; apart: the finish reason's event
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    together = 1
    apart = False

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        chat = self.path == "/v1/chat/completions"
        assert chat or self.path == "/v1/completions"
        assert ("messages" in asked) == chat
        assert asked["ignore_eos"]
        assert asked["stream"]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        tokens = asked["max_tokens"]
        if chat:
            self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for first in range(0, tokens, self.together):
            text = " a" * min(self.together, tokens - first)
            self._event({"choices": [{"index": 0, "text": text}]})
        if self.apart:
            self._event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        self._event({"choices": [], "usage": {"completion_tokens": tokens}})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, value: object) -> None:
        self._chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:

    Handler.together = int(sys.argv[2])
    Handler.apart = "apart" in sys.argv[3:]
    subprocess.Popen(["VLLM::EngineCore", "100"], executable=shutil.which("sleep"))
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()


if __name__ == "__main__":
    main()
