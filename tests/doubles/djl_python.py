"""A stand-in for the few parts of djl_python that the worker touches, where there is no Java."""

from __future__ import annotations

import types


class Output:
    """As djl_python's; `data` is what it would send, but for the framing."""

    def __init__(self, code: int = 200, message: str = "OK") -> None:
        self.code, self.message = code, message
        self.properties: dict[str, str] = {}
        self.data = b""

    def add_property(self, name: str, value: str) -> Output:
        self.properties[name] = value
        return self

    def add(self, value: bytes, key: str) -> Output:
        self.data += value
        return self

    @staticmethod
    def write_utf8(buffer: bytearray, text: str) -> None:
        buffer += len(text).to_bytes(4, "big")


class Content(dict[str, bytes]):
    """Keys with their values, in order."""

    def size(self) -> int:
        return len(self)

    def get_keys(self) -> list[str]:
        return list(self)

    def get_values(self) -> list[bytes]:
        return list(self.values())


class Input:
    """A call, with its properties and its content."""

    def __init__(self, properties: dict[str, str], content: dict[str, bytes]) -> None:
        self._properties = properties
        self._content = Content(content)

    def get_properties(self) -> dict[str, str]:
        return self._properties

    def get_content(self) -> Content:
        return self._content


class Connection:
    """The Java side's: keeps what is written."""

    def __init__(self) -> None:
        self.written = b""

    def sendall(self, data: bytes) -> None:
        self.written += data


def stand_in() -> types.ModuleType:
    """Return the module `djl_python`."""
    module = types.ModuleType("djl_python")
    vars(module).update(__version__="0.34.0", Input=Input, Output=Output)
    return module
