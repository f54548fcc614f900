"""One of DJL's Python workers, started and spoken to as DJL's Java side does; numbers are big-endian."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

_SHORT = struct.Struct(">h")
_INT = struct.Struct(">i")
_STARTED = "Python engine started."  # what Java waits for, too


class Worker:
    """Made by `start`; `version`: that of its djl_python, for those who have set it."""

    version = ""

    def __init__(self, process: subprocess.Popen[str], wire: Wire) -> None:
        self._process = process
        self._wire = wire
        self._last: deque[str] = deque(maxlen=20)
        self._started = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def connect(self, path: str) -> None:
        self._started.wait()
        if self._process.poll() is not None:
            raise RuntimeError(f"the worker did not start:\n{self.log}")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._stream = self._socket.makefile("rb")

    @property
    def socket(self) -> socket.socket:
        """For who wants to write a request in his own way; `reply` reads its answer."""
        return self._socket

    def encode(self, properties: Mapping[str, str], contents: Sequence[tuple[str, bytes]]) -> bytes:
        return self._wire.request({**properties, "handler": "handle"}, contents)

    def reply(self) -> Reply:
        return self._wire.reply(self._stream)

    def call(self, properties: Mapping[str, str], contents: Sequence[tuple[str, bytes]]) -> Reply:
        try:
            self._socket.sendall(self.encode(properties, contents))
            reply = self.reply()
        except OSError as error:
            raise RuntimeError(f"{error}:\n{self.log}") from None
        if reply.code >= 300:
            raise RuntimeError(f"the worker answers {reply.code} {reply.message}:\n{self.log}")
        return reply

    def string_map(self, data: bytes) -> dict[str, str]:
        return self._wire.string_map(data)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return "".join(self._last).rstrip()

    def close(self) -> None:
        """It ends when its connection does."""
        if hasattr(self, "_socket"):
            self._stream.close()
            self._socket.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(5)

    def _read(self) -> None:
        """Always, for a full pipe would stop it."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._last.append(line)
                if _STARTED in line:
                    self._started.set()
        self._process.wait()
        self._started.set()


@contextlib.contextmanager
def start(python: Path, engine: Path, model: Path, properties: Mapping[str, str]) -> Iterator[Worker]:
    """A worker that has loaded the model.

    Args:
        python: the interpreter.
        engine: the directory that holds djl_python.
        model: the model's directory.
        properties: of its serving.properties, as `handler.model_properties` makes them.
    """
    with tempfile.TemporaryDirectory(prefix="djl-worker-") as scratch:
        path = f"{scratch}/socket"
        command = [str(python), str(engine / "djl_python_engine.py"), "--sock-type", "unix", "--sock-name", path]
        command += ["--model-dir", str(model), "--entry-point", properties.get("entryPoint", "model.py")]
        process = subprocess.Popen(command, cwd=model, env=_environment(engine, model), **_PIPES)
        worker = Worker(process, Wire(engine))
        try:
            worker.connect(path)
            worker.call({**properties, "model_dir": str(model)}, [])
            yield worker
        finally:
            worker.close()


_PIPES: dict[str, Any] = {
    "stdin": subprocess.DEVNULL,
    "stdout": subprocess.PIPE,
    "stderr": subprocess.STDOUT,
    "text": True,
}


def _environment(engine: Path, model: Path) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OPTION_", "SERVING_"))}
    path = [*filter(None, [os.environ.get("PYTHONPATH")]), str(engine), str(model)]
    return {**clean, "PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}


# -- messages ----------------------------------------------------------------------------------------------------------


class Reply(NamedTuple):
    code: int
    message: str
    properties: dict[str, str]
    contents: list[tuple[str, bytes]]


class Wire:
    """The format of one version. A string's length has 16 bits up to 0.27, then 32."""

    def __init__(self, engine: Path) -> None:
        """Read the version from the djl_python in `engine`."""
        source = (engine / "djl_python" / "outputs.py").read_text()
        self._length = _INT if "struct.pack('>i', len(buf))" in source else _SHORT

    def request(self, properties: Mapping[str, str], contents: Sequence[tuple[str, bytes]]) -> bytes:
        parts = [_SHORT.pack(len(properties))]
        for key, value in properties.items():
            parts += self._string(key), self._string(value)
        parts.append(_SHORT.pack(len(contents)))
        for key, data in contents:
            parts += self._string(key), _INT.pack(len(data)), data
        return b"".join(parts)

    def reply(self, stream: BinaryIO) -> Reply:
        code, message = _number(_SHORT, stream), self._read_string(stream)
        properties = {}
        for _ in range(_number(_SHORT, stream)):
            key = self._read_string(stream)
            properties[key] = self._read_string(stream)
        contents = []
        for _ in range(_number(_SHORT, stream)):
            key = self._read_string(stream)
            contents.append((key, _read(stream, _number(_INT, stream))))
        return Reply(code, message, properties, contents)

    def string_map(self, data: bytes) -> dict[str, str]:
        """Decode a step's content for one request."""
        count = _SHORT.unpack_from(data)[0]
        at = _SHORT.size
        strings = []
        for _ in range(2 * count):
            size = self._length.unpack_from(data, at)[0]
            at += self._length.size
            strings.append(data[at : at + size].decode() if size > 0 else "")
            at += max(0, size)
        return dict(zip(strings[::2], strings[1::2], strict=True))

    def _string(self, text: str) -> bytes:
        data = text.encode()
        return self._length.pack(len(data)) + data

    def _read_string(self, stream: BinaryIO) -> str:
        return _read(stream, max(0, _number(self._length, stream))).decode()  # -1 is null


def _number(form: struct.Struct, stream: BinaryIO) -> int:
    found: int = form.unpack(_read(stream, form.size))[0]
    return found


def _read(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise ConnectionError("the worker closed the connection")
    return data
