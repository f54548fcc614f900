"""The Java side of a worker, as DJL writes calls and reads the answers to steps, where there is no Java."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple, TypeAlias

from tests.doubles.djl_python import Connection, Input
from tests.doubles.djl_python_engine import STARTED

Call: TypeAlias = "tuple[dict[str, str | None], list[tuple[str | None, bytes]]]"


def message(length: str, properties: dict[str, str | None], contents: list[tuple[str | None, bytes]]) -> bytes:
    """Return a call as Java writes it: of each number the lowest bits."""

    def string(text: str | None) -> bytes:
        data = text.encode() if text is not None else b""
        size = len(data) if text is not None else -1
        return size.to_bytes(8, "big", signed=True)[-struct.calcsize(length) :] + data

    parts = [struct.pack(">H", len(properties) & 0xFFFF)]
    parts += [string(key) + string(value) for key, value in properties.items()]
    parts.append(struct.pack(">H", len(contents) & 0xFFFF))
    parts += [string(key) + struct.pack(">i", len(value)) + value for key, value in contents]
    return b"".join(parts)


class Request:
    """A client's request, and what Java has sent of its answer.

    Attributes:
        status: None until the answer has begun.
    """

    def __init__(self, body: bytes, headers: Mapping[str, str]) -> None:
        self.body, self.headers = body, headers
        self.status: int | None = None
        self.answer = b""
        self.answer_headers: dict[str, str] = {}
        self.is_new = True


class RollingBatch:
    """Java's list of live requests (RollingBatch.java and Request.java since 0.29): answers are matched by position.

    Args:
        read, answer: the worker's: they read a call from a connection, and answer it.

    Raises:
        AssertionError: an answer for which Java would fail all of the requests.
    """

    def __init__(self, read: Callable[[Input, Any], None], answer: Callable[[Input], Any]) -> None:
        self._read, self._answer = read, answer
        self.live: list[Request] = []

    def step(self, *new: Request) -> None:
        """Run a step, in which these join."""
        call, connection = Input(), Connection()
        self._read(call, SimpleNamespace(recv=io.BytesIO(self._call(*new)).read))
        self._answer(call).send(connection)
        self._take(connection.written)

    def _call(self, *new: Request) -> bytes:
        """Return the next step's call, in which these join: a map of properties, sorted, then the contents."""
        self.live += new
        properties: dict[str, str | None] = {"handler": "handle", "batch_size": str(len(self.live))}
        contents: list[tuple[str | None, bytes]] = []
        for index, request in enumerate(self.live):
            prefix = f"batch_{index:03d}."
            contents.append((prefix + "data", request.body if request.is_new else b""))
            if request.is_new:
                contents.append((prefix + "seed", b"7"))
                properties |= {prefix + name: value for name, value in request.headers.items()}
            request.is_new = False
        return message(">i", dict(sorted(properties.items())), contents)

    def _take(self, answer: bytes) -> None:
        """Give each request its piece; those that are answered leave."""
        wire = _Wire(answer)
        assert (wire.number(">h"), wire.text()) == (200, "OK")
        headers = dict(wire.pairs())
        values = [(wire.text(), wire.data())[1] for _ in range(wire.number(">h"))]
        assert (wire.rest, len(values)) == (b"", len(self.live))
        pieces = [dict(_Wire(value).pairs()) for value in values]
        for index, (request, piece) in enumerate(zip(self.live, pieces, strict=True)):
            prefix, data = f"batch_{index}_", piece["data"]
            request.answer_headers |= {k.removeprefix(prefix): v for k, v in headers.items() if k.startswith(prefix)}
            if code := piece.get("code"):
                request.status = request.status or int(code)
                request.answer += json.dumps({"error": piece["error"], "code": int(code)}).encode()
            elif data or piece["last"] == "true":
                request.status = request.status or 200
                request.answer += data.encode()
        self.live = [r for r, piece in zip(self.live, pieces, strict=True) if piece["last"] != "true"]


class _Wire:
    def __init__(self, rest: bytes) -> None:
        self.rest = rest

    def number(self, form: str) -> int:
        size = struct.calcsize(form)
        data, self.rest = self.rest[:size], self.rest[size:]
        number: int = struct.unpack(form, data)[0]
        return number

    def data(self) -> bytes:
        size = self.number(">i")
        data, self.rest = self.rest[:size], self.rest[size:]
        return data

    def text(self) -> str:
        return self.data().decode()

    def pairs(self) -> Iterator[tuple[str, str]]:
        for _ in range(self.number(">h")):
            yield self.text(), self.text()


class Answer(NamedTuple):
    """What the worker has written about one call, whichever it was."""

    code: int
    message: str
    properties: dict[str, str]
    contents: list[bytes]


class PyProcess:
    """A worker and Java's connection to it, as PyProcess.java and Connection.java have them up to 0.36.

    There is one future a connection. Each call puts its own in that place, and each message of the worker completes
    the one that is there; where that is done already, the message is lost.

    Args:
        model: the model's directory; its parent has the socket.
    """

    def __init__(self, version: str, model: Path) -> None:
        self._model = model
        self._path = model.parent / "djl_sock.19000"
        self._path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tests.doubles.djl_python_engine", "--version", version]
        command += ["--sock-name", str(self._path), "--model-dir", str(model)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
        assert self.process.stdout is not None
        while STARTED not in self.process.stdout.readline():
            assert self.process.poll() is None
        self._drain = threading.Thread(target=self.process.communicate, daemon=True)
        self._drain.start()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(self._path))
        self._future: Future[Answer] = Future()
        self._unsent: list[bytes] | None = None
        self.num_messages = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def load(self, properties: Mapping[str, str]) -> Future[Answer]:
        """Make the first call (PyProcess.startPythonProcess)."""
        return self.send({**properties, "model_dir": str(self._model)})

    def send(self, properties: Mapping[str, str], contents: Mapping[str, bytes] | None = None) -> Future[Answer]:
        """Make a call (Connection.send)."""
        future = self._future = Future()
        call = {"handler": "handle", **properties}
        written = message(">i", dict(sorted(call.items())), list((contents or {}).items()))
        if self._unsent is None:
            self._socket.sendall(written)
        else:
            self._unsent.append(written)
        return future

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Send the calls of a block in one write, so that the worker answers none of them before all have come."""
        self._unsent = []
        yield
        self._socket.sendall(b"".join(self._unsent))
        self._unsent = None

    def step(self, *texts: str, old: int = 0, reset: bool = False) -> Future[Answer]:
        """Make a step, in which requests for these texts join `old` ones."""
        contents = {f"batch_{index:03d}.data": b"" for index in range(old)}
        for index, text in enumerate(texts, old):
            body = {"inputs": text, "parameters": {"max_new_tokens": 2}, "stream": True}
            contents |= {f"batch_{index:03d}.data": json.dumps(body).encode(), f"batch_{index:03d}.seed": b"7"}
        size = str(old + len(texts))
        return self.send({"batch_size": size, **({"reset_rollingbatch": "true"} if reset else {})}, contents)

    def kill(self) -> None:
        self.process.kill()
        self._drain.join()
        self._reader.join()
        self._socket.close()

    def _read(self) -> None:
        with self._socket.makefile("rb") as stream, contextlib.suppress(OSError, struct.error):
            while True:
                answer = _read_answer(stream)
                self.num_messages += 1
                with contextlib.suppress(InvalidStateError):
                    self._future.set_result(answer)
        with contextlib.suppress(InvalidStateError):
            self._future.set_exception(ConnectionError("Python worker disconnected."))


def _read_answer(stream: BinaryIO) -> Answer:
    def number(form: str) -> int:
        found: int = struct.unpack(form, stream.read(struct.calcsize(form)))[0]
        return found

    def data() -> bytes:
        return stream.read(number(">i"))

    code, words = number(">h"), data().decode()
    properties = {data().decode(): data().decode() for _ in range(number(">h"))}
    return Answer(code, words, properties, [(data(), data())[1] for _ in range(number(">h"))])
