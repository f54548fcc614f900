"""Messages between DJL's Java side and a worker, written from Java's side; numbers are big-endian."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

_SHORT = struct.Struct(">h")
_INT = struct.Struct(">i")


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
