"""Versions of djl_python made to read: without Java, from a connection that brings bytes in any pieces."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
from typing import Any

import pytest

from handler.djl.wire import Reader, installed_version
from tests.doubles.djl_java import Call, message
from tests.doubles.djl_python import Input

FORM = "application/x-www-form-urlencoded; charset=UTF-8"

LENGTHS = pytest.mark.parametrize("length", [">h", ">i"])


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


def read(reader: Any, connection: Connection | socket.socket) -> tuple[str | None, dict[str, str | None], list[Any]]:
    inputs = Input()
    reader.read(inputs, connection)
    contents = list(zip(inputs.content.keys, map(bytes, inputs.content.values), strict=True))
    found = inputs.function_name, dict(inputs.properties), contents
    inputs.properties["device_id"] = "djl_python's own"
    inputs.content.keys.append("another's")
    return found


IS_TRUE = {
    "0.27.0": {"json_errors", "commits_early", "always_steps", "steps_all_ranks", "calls_early", "tells_all_workers"},
    "0.28.0": {"json_errors", "commits_early", "steps_all_ranks", "passes_headers", "calls_early", "tells_all_workers"},
    "0.29.0": {"passes_headers", "metric_types", "calls_early", "tells_all_workers"},
    "0.30.0-SNAPSHOT": {"passes_headers", "metric_types", "names_requests", "tells_all_workers"},
    "0.31.0": {"passes_headers", "metric_types", "names_requests"},
}


@pytest.mark.parametrize("version", IS_TRUE)
def test_what_a_release_does_begins_with_it(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("handler.djl.wire.djl_python.__version__", version)
    found = installed_version()._asdict()
    assert {name for name, value in found.items() if value is True} == IS_TRUE[version]


@LENGTHS
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 20])
def test_messages_are_read_from_pieces_of_any_size(length: str, size: int) -> None:
    same: Call = ({"handler": "handle", "batch_size": "2"}, [("batch_000.data", b""), ("batch_001.data", b"")])
    steps: list[Call] = [
        ({"handler": "handle", "é": None}, []),
        ({"handler": "handle", "batch_size": "2"}, [("batch_000.data", b""), ("batch_001.data", b"x" * 99)]),
        *[same] * 3,
        ({"handler": "handle", "batch_size": "1"}, [("batch_000.data", b"")]),
        ({"handler": None}, [(None, b"a"), ("b", b"")]),
    ]
    connection = Connection(b"".join(message(length, *step) for step in steps), size)
    reader = Reader(struct.Struct(length))
    for properties, contents in steps:
        assert read(reader, connection) == (properties.get("handler"), properties, contents)
    with pytest.raises(ValueError, match="Connection disconnected"):
        read(reader, connection)


@LENGTHS
def test_a_large_body_is_received_in_few_calls(length: str) -> None:
    body = b"x" * (3 << 20)
    connection = Connection(message(length, {"handler": "handle"}, [("data", body), ("seed", b"7")]), 1 << 30)
    assert read(Reader(struct.Struct(length)), connection)[2] == [("data", body), ("seed", b"7")]
    assert connection.received <= 3


@LENGTHS
@pytest.mark.parametrize("headers", [1, 40])
def test_a_step_may_have_as_many_headers_as_its_16_bits_count(length: str, headers: int) -> None:
    """Each of 1,100 requests that join at once brings its own."""
    properties: dict[str, str | None] = {"handler": "handle", "batch_size": "1100"}
    properties |= {f"batch_{index:03d}.x-{name}": "v" for index in range(1100) for name in range(headers)}
    contents: list[tuple[str | None, bytes]] = [(f"batch_{index:03d}.data", b"{}") for index in range(1100)]
    found = read(Reader(struct.Struct(length)), Connection(message(length, properties, contents), 1 << 20))
    assert found == ("handle", properties, contents)


@LENGTHS
@pytest.mark.parametrize("more", [0, 1, 7, 65_536])
def test_a_step_may_have_more_headers_than_its_16_bits_count(length: str, more: int) -> None:
    """Java's map is sorted: all that begins with `batch_` comes before `handler`."""
    properties: dict[str, str | None] = {f"batch_{index:03d}.x": "v" for index in range(65_536 + more)}
    properties |= {"batch_size": "256", "handler": "handle"}
    contents: list[tuple[str | None, bytes]] = [(f"batch_{index:03d}.data", b"{}") for index in range(256)]
    steps: list[Call] = [(properties, contents), ({"batch_size": "1", "handler": "handle"}, [("batch_000.data", b"")])]
    connection = Connection(b"".join(message(length, *step) for step in steps), 1 << 16)
    reader = Reader(struct.Struct(length))
    for step in steps:
        assert read(reader, connection) == ("handle", *step)


@LENGTHS
@pytest.mark.parametrize("more", [0, 1, 65_536])
def test_a_batch_may_have_more_contents_than_its_16_bits_count(length: str, more: int) -> None:
    """Each name of a request's query is one; those of the last request come last."""
    properties: dict[str, str | None] = {"batch_size": "100", "handler": "handle"}
    contents: list[tuple[str | None, bytes]] = [(f"batch_{index % 99:03d}.q", b"") for index in range(65_536 + more)]
    contents += [("batch_099.data", b"{}"), ("batch_099.seed", b"7")]
    wire = message(length, properties, contents)
    assert read(Reader(struct.Struct(length)), Connection(wire, 1 << 16)) == ("handle", properties, contents)


@LENGTHS
def test_a_batch_whose_last_request_is_empty_ends_where_its_count_says(length: str) -> None:
    java, worker = socket.socketpair()
    with java, worker:
        properties: dict[str, str | None] = {"batch_size": "2", "handler": "handle"}
        for _ in range(2):
            java.sendall(message(length, properties, [("batch_000.data", b"{}")]))
            found = read(Reader(struct.Struct(length)), worker)
            assert found == ("handle", properties, [("batch_000.data", b"{}")])


@LENGTHS
@pytest.mark.parametrize("number", [65_534, 65_535, 65_536])
def test_a_batch_whose_properties_are_65_536_follows_a_form(length: str, number: int) -> None:
    """Its call begins with two zero bytes, as a content of the form would."""
    form: Call = ({"Content-Type": FORM, "handler": "handle"}, [("data", b"{}")])
    properties: dict[str, str | None] = {f"batch_{index:03d}.x": "v" for index in range(number - 2)}
    batch: Call = ({**properties, "batch_size": "9", "handler": "handle"}, [("batch_008.data", b"")])
    java, worker = socket.socketpair()
    with java, worker:
        reader = Reader(struct.Struct(length))
        for call in (form, batch, form):
            writer = threading.Thread(target=java.sendall, args=(message(length, *call),))
            writer.start()
            assert read(reader, worker) == ("handle", *call)
            writer.join()


@LENGTHS
@pytest.mark.parametrize("name", ["{}", "{}" + "n" * 70_000, ""], ids=["short", "long", "none"])
@pytest.mark.parametrize("more", [0, 1, 65_536])
def test_a_form_with_more_fields_than_16_bits_count_costs_no_call_after_it(length: str, name: str, more: int) -> None:
    fields: list[tuple[str | None, bytes]] = [(f"f{index}", b"v") for index in range(65_536 + more)]
    fields[-1] = fields[more] = (name.format("f"), b"v")
    client: dict[str, str | None] = {"content-type": FORM, "host": "here", "batch_size": "7", "handler": "handle"}
    after: Call = ({"handler": "handle"}, [("data", b"{}")])
    calls = [message(length, *call) for call in [(client, fields), after, after]]
    waits = length == ">h"  # this Java sends a call when it has the answer to the one before
    java, worker = socket.socketpair()
    with java, worker:
        reader = Reader(struct.Struct(length))
        for index, call in enumerate([(client, fields), after, after]):
            if waits or index == 0:
                wire = calls[index] if waits else b"".join(calls)
                writer = threading.Thread(target=java.sendall, args=(wire,))
                writer.start()
            found = read(reader, worker)
            assert found[:2] == ("handle", call[0])
            assert index == 0 or found == ("handle", *after)
            if waits:
                writer.join()
        writer.join()


@pytest.mark.parametrize(
    ("size", "text"),
    [*itertools.product([32_767, 32_768, 65_534, 65_535, 65_536, 65_537, 200_000], ["n", "é"]), (65_534, "\0")],
)
def test_a_key_may_be_longer_than_its_16_bits_tell(size: int, text: str) -> None:
    """A body that its client called a form by mistake is one field's name, with nothing for its value."""
    name = text * (size // len(text.encode())) + "n" * (size % len(text.encode()))
    form: Call = ({"Content-Type": FORM, "handler": "handle"}, [(name, b""), (None, b"")])
    batch: Call = (
        {"batch_size": "2", "handler": "handle"},
        [("batch_000." + name, b""), ("batch_001.data", b"{}")],
    )
    java, worker = socket.socketpair()
    with java, worker:
        reader = Reader(struct.Struct(">h"))
        for call in (form, batch):
            writer = threading.Thread(target=java.sendall, args=(message(">h", *call),))
            writer.start()
            assert read(reader, worker) == ("handle", *call)
            writer.join()
