"""A stand-in for the few parts of djl_python that the worker touches, where there is no Java."""

from __future__ import annotations

import struct
import types
from collections.abc import Iterator, Mapping
from typing import Any


class Output:
    """As djl_python's; `data` is what it would send, but for the framing."""

    def __init__(self, code: int = 200, message: str = "OK") -> None:
        self.code, self.message = code, message
        self.properties: dict[str, str] = {}
        self.data = b""
        self.contents: list[bytes] = []
        self.stream: Iterator[bytes] | None = None

    def add_property(self, name: str, value: str) -> Output:
        self.properties[name] = value
        return self

    def add(self, value: bytes, key: str, batch_index: int = 0) -> Output:
        self.data += value
        self.contents.append(value)
        return self

    def add_stream_content(self, pieces: Iterator[bytes], output_formatter: None) -> Output:
        self.stream = pieces
        return self

    def send(self, connection: Any) -> None:
        """Write the answer, as djl_python does since 0.28; without a stream, and each content by the same key."""
        written = bytearray(struct.pack(">h", self.code))
        self.write_utf8(written, self.message)
        written += struct.pack(">h", len(self.properties))
        for text in (text for pair in self.properties.items() for text in pair):
            self.write_utf8(written, text)
        written += struct.pack(">h", len(self.contents))
        for value in self.contents:
            self.write_utf8(written, "data")
            written += struct.pack(">i", len(value)) + value
        connection.sendall(bytes(written))

    @staticmethod
    def write_utf8(buffer: bytearray, text: str) -> None:
        buffer += len(text.encode()).to_bytes(4, "big") + text.encode()


class PairList:
    """Keys with their values, in order."""

    def __init__(self) -> None:
        self.keys: list[str | None] = []
        self.values: list[Any] = []

    def size(self) -> int:
        return len(self.keys)

    def get(self, key: str) -> Any:
        return self.values[self.keys.index(key)] if key in self.keys else None

    def value_at(self, index: int) -> Any:
        return self.values[index]

    def get_keys(self) -> list[str | None]:
        return self.keys

    def get_values(self) -> list[Any]:
        return self.values


class Input:
    """A call, with its properties and its content; without arguments it is one to be read."""

    def __init__(self, properties: Mapping[str, str] | None = None, content: Mapping[str, bytes] | None = None) -> None:
        self.function_name: str | None = None
        self.properties: dict[Any, Any] = dict(properties or {})
        self.content = PairList()
        for key, value in (content or {}).items():
            self.content.keys.append(key)
            self.content.values.append(value)

    def get_properties(self) -> dict[Any, Any]:
        return self.properties

    def get_content(self) -> PairList:
        return self.content

    def read(self, connection: Any) -> None:
        """Read a call, field by field."""
        for _ in range(_number(connection, ">h")):
            name = _string(connection)
            self.properties[name] = _string(connection)
        for _ in range(_number(connection, ">h")):
            self.content.keys.append(_string(connection))
            self.content.values.append(_bytes(connection, _number(connection, ">i")))
        self.function_name = self.properties.get("handler")


def _string(connection: Any) -> str:
    return _bytes(connection, _number(connection, ">i")).decode()


def _number(connection: Any, form: str) -> int:
    number: int = struct.unpack(form, _bytes(connection, struct.calcsize(form)))[0]
    return number


def _bytes(connection: Any, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += connection.recv(size - len(data)) or _closed()
    return data


def _closed() -> bytes:
    raise ValueError("Connection disconnected")


class Connection:
    """The Java side's: keeps what is written."""

    def __init__(self) -> None:
        self.written = b""

    def sendall(self, data: bytes) -> None:
        self.written += data


def stand_in(version: str = "0.34.0") -> types.ModuleType:
    """Return the module `djl_python`."""
    module = types.ModuleType("djl_python")
    vars(module).update(__version__=version, Input=Input, Output=Output)
    return module
