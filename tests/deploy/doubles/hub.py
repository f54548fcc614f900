"""A hub on loopback: a model's files, headers of safetensors of any size, and what goes wrong with both."""

from __future__ import annotations

import json
import math
import re
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote


@dataclass
class Model:
    """A model's files.

    Attributes:
        files: content by name; a number of bytes after it are zeros that nobody reads.
        gated: whether only the holder of `token` gets files; its list is everyone's.
        elsewhere: redirect files to this address, as the hub does to its store.
    """

    files: Mapping[str, tuple[bytes, int]]
    gated: bool = False
    elsewhere: str = ""


@dataclass
class HubDouble:
    url: str = ""
    models: dict[str, Model] = field(default_factory=dict)
    token: str = "hf_good"
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    """Paths, and the Authorization that came with them."""

    sent: int = 0
    """Bytes of files that were sent."""

    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """Answers of other paths."""

    delay: float = 0.0
    ranges: bool = True

    def add(self, name: str, config: Mapping[str, Any] | bytes, **files: tuple[bytes, int]) -> Model:
        content = config if isinstance(config, bytes) else json.dumps(config).encode()
        named = {key.replace("__", "-").replace("_DOT_", "."): value for key, value in files.items()}
        self.models[name] = Model({"config.json": (content, 0), **named})
        return self.models[name]


@contextmanager
def serving() -> Iterator[HubDouble]:
    double = HubDouble()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _answer(double, self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    double.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield double
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _answer(double: HubDouble, request: BaseHTTPRequestHandler) -> None:
    path = unquote(request.path.partition("?")[0])
    double.asked.append((path, request.headers.get("Authorization")))
    time.sleep(double.delay)
    if path in double.answers:
        status, body = double.answers[path]
        return _send(request, status, body)
    listed = re.fullmatch(r"/api/models/(.+)/revision/([^/]+)", path)
    file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
    match = listed or file
    if match is None or (model := double.models.get(match[1])) is None or match[2] != "main":
        return _send(request, 401, b"")  # as the hub answers to whoever is nobody
    if listed is not None:
        siblings = [{"rfilename": name, "size": len(start) + more} for name, (start, more) in model.files.items()]
        return _send(request, 200, json.dumps({"id": match[1], "gated": model.gated, "siblings": siblings}).encode())
    if model.gated and request.headers.get("Authorization") != f"Bearer {double.token}":
        return _send(request, 401, b"", {"X-Error-Code": "GatedRepo"})
    if model.elsewhere:
        return _send(request, 302, b"", {"Location": model.elsewhere + request.path})
    assert file is not None
    return _piece(double, request, *model.files[file[3]])


def _piece(double: HubDouble, request: BaseHTTPRequestHandler, start: bytes, more: int) -> None:
    asked = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
    if asked is None or not double.ranges:
        return _send(request, 200, start)
    first, last = int(asked[1]), min(int(asked[2]), len(start) + more - 1)
    body = start[first : last + 1]
    body += bytes(last + 1 - first - len(body))
    double.sent += len(body)
    return _send(request, 206, body)


def _send(request: BaseHTTPRequestHandler, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
    request.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(body)


BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "U8": 1, "I32": 4}

Tensors = Mapping[str, tuple[str, Sequence[int]]]
"""Types and shapes by name."""


def safetensors_header(tensors: Tensors) -> tuple[bytes, int]:
    """Return a file's beginning, and the bytes of all tensors."""
    said: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * BYTES[dtype]
        said[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    content = json.dumps(said).encode()
    return struct.pack("<Q", len(content)) + content, at


def write_safetensors(path: Path, tensors: Tensors) -> int:
    """Write a file, and return the bytes of its tensors."""
    start, size = safetensors_header(tensors)
    with path.open("wb") as file:
        file.write(start)
        file.truncate(len(start) + size)
    return size
