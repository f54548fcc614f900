"""How djl_python is made to read: without Java, from a connection that brings bytes in any pieces."""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

import pytest

from tests.unit.djl.test_modes import modes

__all__ = ["modes"]

Call: TypeAlias = "tuple[dict[str, str | None], list[tuple[str | None, bytes]]]"

LENGTHS = pytest.mark.parametrize("length", [">h", ">i"])


class PairList:
    def __init__(self) -> None:
        self.keys: list[str | None] = []
        self.values: list[bytes] = []


class Input:
    def __init__(self) -> None:
        self.function_name: str | None = None
        self.properties: dict[str, str | None] = {}
        self.content = PairList()


class Connection:
    """Brings `data` in pieces of `size` bytes, then its end."""

    def __init__(self, data: bytes, size: int) -> None:
        self.data, self.size = data, size
        self.received = 0

    def recv(self, size: int) -> bytes:
        piece = self.data[: min(size, self.size)]
        self.data = self.data[len(piece) :]
        self.received += 1
        return piece


def message(length: str, properties: dict[str, str | None], contents: list[tuple[str | None, bytes]]) -> bytes:
    def string(text: str | None) -> bytes:
        return struct.pack(length, -1) if text is None else struct.pack(length, len(text.encode())) + text.encode()

    parts = [struct.pack(">H", len(properties) & 0xFFFF)]
    parts += [string(key) + string(value) for key, value in properties.items()]
    parts.append(struct.pack(">H", len(contents) & 0xFFFF))
    parts += [string(key) + struct.pack(">i", len(value)) + value for key, value in contents]
    return b"".join(parts)


def read(reader: Any, connection: Connection) -> tuple[str | None, dict[str, str | None], list[Any]]:
    inputs = Input()
    reader.read(inputs, connection)
    contents = list(zip(inputs.content.keys, map(bytes, inputs.content.values), strict=True))
    found = inputs.function_name, dict(inputs.properties), contents
    inputs.properties["device_id"] = "djl_python's own"
    inputs.content.keys.append("another's")
    return found


@LENGTHS
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 20])
def test_messages_are_read_from_pieces_of_any_size(modes: Any, length: str, size: int) -> None:
    same: Call = ({"handler": "handle", "batch_size": "2"}, [("batch_000.data", b""), ("batch_001.data", b"")])
    steps: list[Call] = [
        ({"handler": "handle", "é": None}, []),
        ({"handler": "handle", "batch_size": "2"}, [("batch_000.data", b""), ("batch_001.data", b"x" * 99)]),
        *[same] * 3,
        ({"handler": "handle", "batch_size": "1"}, [("batch_000.data", b"")]),
        ({"handler": None}, [(None, b"a"), ("b", b"")]),
    ]
    connection = Connection(b"".join(message(length, *step) for step in steps), size)
    reader = modes.Reader(struct.Struct(length))
    for properties, contents in steps:
        assert read(reader, connection) == (properties.get("handler"), properties, contents)
    with pytest.raises(ValueError, match="Connection disconnected"):
        read(reader, connection)


@LENGTHS
def test_a_large_body_is_received_in_few_calls(modes: Any, length: str) -> None:
    body = b"x" * (3 << 20)
    connection = Connection(message(length, {"handler": "handle"}, [("data", body), ("seed", b"7")]), 1 << 30)
    assert read(modes.Reader(struct.Struct(length)), connection)[2] == [("data", body), ("seed", b"7")]
    assert connection.received <= 3


@LENGTHS
@pytest.mark.parametrize("headers", [1, 40])
def test_a_step_may_have_as_many_headers_as_its_16_bits_count(modes: Any, length: str, headers: int) -> None:
    """Each of 1,100 requests that join at once brings its own."""
    properties: dict[str, str | None] = {"handler": "handle", "batch_size": "1100"}
    properties |= {f"batch_{index:03d}.x-{name}": "v" for index in range(1100) for name in range(headers)}
    contents: list[tuple[str | None, bytes]] = [(f"batch_{index:03d}.data", b"{}") for index in range(1100)]
    found = read(modes.Reader(struct.Struct(length)), Connection(message(length, properties, contents), 1 << 20))
    assert found == ("handle", properties, contents)


def test_more_headers_end_the_worker_not_the_order_of_its_answers(modes: Any) -> None:
    properties: dict[str, str | None] = {f"batch_{index:03d}.x": "v" for index in range(70_000)}
    properties |= {"handler": "handle", "batch_size": "70000"}
    connection = Connection(message(">i", properties, [("batch_000.data", b"{}")]), 1 << 20)
    with pytest.raises(ValueError, match="more than 65,535 headers in a step"):
        read(modes.Reader(struct.Struct(">i")), connection)
