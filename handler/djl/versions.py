"""Differences between versions of DJL Serving, and a faster way to receive what djl_python reads."""

from __future__ import annotations

import select
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import djl_python
from djl_python import Input, Output

from handler.config import environment

MAX_FIELD = environment.netty_buffer_bytes() // 2  # room for what is around it
"""Bytes of a field that Java takes; with a larger one it gives the worker up, and everybody in it."""

_OF_HTTP = frozenset(
    {"host", "connection", "content-length", "content-type", "user-agent", "x-request-id", "requestid"}
)
"""Properties of a client's own; in a batch, Java puts its prefix before them."""

_RECEIVE_BYTES = 1 << 16  # Python makes room for as many at each call

_COUNT, _INT = struct.Struct(">H"), struct.Struct(">i")
"""Of fields, and of bytes."""

_WRAP = 1 << 16
"""Java writes the low 16 bits of a count, and 256 new requests may have 70,000 headers: each of SageMaker's custom
attributes is one. Java's map of properties is sorted, so that `handler` comes after every `batch_...`: while it is
missing, this many more follow. Contents are in the order of the requests: while the last one's are missing too."""

_SOON = 0.1  # seconds in which more of a call comes, where its count leaves open whether any does


def is_of_http(properties: Mapping[Any, Any]) -> bool:
    """Whether they are a client's headers, not Java's own words."""
    return not _OF_HTTP.isdisjoint(str(name).lower() for name in properties)


class DjlVersion(NamedTuple):
    """What differs between versions; nothing else asks which one it is.

    Attributes:
        length: of a string: two bytes before 0.28, four since.
        json_errors: a piece that is JSON of `data` and `last`, where `data` is JSON with `code` and `error`, sets the
            request's status and keeps the body; since 0.29 `code` and `error` in the piece's map do, and make the body.
        commits_early: a first piece without bytes begins the answer, with its status; since 0.29 it is ignored.
        always_steps: a rolling batch is stepped whenever option.rolling_batch is there, be it `disable`.
        steps_all_ranks: a step goes to all ranks of an MPI world, and the last one's answer counts, unless
            option.rolling_batch is `trtllm`.
        passes_headers: a rolling batch's answers have the headers that the worker gives them.
        names_requests: the answers of LMI's rolling batch have Java's id of their request in a header `requestId`.
        metric_types: a [METRICS] line may end with its type: c, g or h, a histogram.
    """

    length: struct.Struct
    json_errors: bool
    commits_early: bool
    always_steps: bool
    steps_all_ranks: bool
    passes_headers: bool
    names_requests: bool
    metric_types: bool

    @property
    def max_piece(self) -> int:
        """Bytes of a piece in a map of strings."""
        return 32_000 if self.length.size == 2 else MAX_FIELD

    def string(self, text: bytes) -> bytes:
        return self.length.pack(len(text)) + text


def installed_version() -> DjlVersion:
    """Return that of the djl_python that runs us."""
    probe = bytearray()
    Output.write_utf8(probe, "")
    version = tuple(int(part) for part in djl_python.__version__.split("-")[0].split(".")[:2])
    return DjlVersion(
        length=struct.Struct(">h" if len(probe) == 2 else ">i"),
        json_errors=version < (0, 29),
        commits_early=version < (0, 29),
        always_steps=version < (0, 28),
        steps_all_ranks=version < (0, 29),
        passes_headers=version >= (0, 28),
        names_requests=version >= (0, 30),
        metric_types=version >= (0, 29),
    )


def read_ahead(version: DjlVersion) -> None:
    """Have djl_python read an Input by a `Reader`."""
    reader = Reader(version.length)
    Input.read = lambda inputs, conn: reader.read(inputs, conn)


class _Message(NamedTuple):
    """`size` is in bytes."""

    properties: dict[str | None, str | None]
    keys: list[str | None]
    values: list[bytearray]
    size: int


class Reader:
    """Receives what lies there at once, where djl_python receives each field of a request by itself.

    A continuing request has three fields and no bytes; 128 of them are 400 system calls a step. While nobody joins or
    leaves, a step's bytes are those of the step before: then they are not parsed.

    Args:
        length: of a string.
    """

    def __init__(self, length: struct.Struct) -> None:
        self._length = length
        self._source: Any = None
        self._received = bytearray()  # what lies after the last message
        self._last = _Message({}, [], [], 0)
        self._bytes_of_last = b""  # empty: they are not kept

    def read(self, inputs: Input, conn: Any) -> None:
        """Fill an Input from the connection, as its own `read` does.

        Raises:
            ValueError: the connection has ended, or what comes is no call. djl_python ends the worker then.
        """
        if conn is not self._source:
            self._source, self._received = conn, bytearray()
        received = self._received
        if not received:
            self._receive(1)
        if not (self._bytes_of_last and received.startswith(self._bytes_of_last)):
            message = self._next_message()
            kept = message.size <= _RECEIVE_BYTES  # a large one would stay in memory until the next one comes
            self._bytes_of_last = bytes(received[: message.size]) if kept else b""
            self._last = message if kept else _Message({}, [], [], 0)
        else:
            message = self._last
        del received[: message.size]
        inputs.properties.update(message.properties)
        inputs.content.keys, inputs.content.values = message.keys[:], message.values[:]
        inputs.function_name = message.properties.get("handler")

    def _next_message(self) -> _Message:
        at = self._skip_contents()
        start = at
        count, at = self._number(_COUNT, at)
        properties: dict[str | None, str | None] = {}
        while True:
            for _ in range(count):
                key, at = self._string(at)
                properties[key], at = self._string(at)
            if "handler" in properties:  # Java names the function in each call
                break
            count = _WRAP
        count, at = self._number(_COUNT, at)
        keys: list[str | None] = []
        values: list[bytearray] = []
        last = _last_request(properties)
        while True:
            at = self._contents(count, at, keys, values)
            if last is None or any(key and key.startswith(last) for key in reversed(keys)) or not self._has_more(at):
                break
            count = _WRAP
        del self._received[:start]
        return _Message(properties, keys, values, at - start)

    def _contents(self, count: int, at: int, keys: list[str | None], values: list[bytearray]) -> int:
        """Read `count` contents; return where the next field begins."""
        for _ in range(count):
            key, at = self._string(at)
            size, start = self._number(_INT, at)
            at = start + size
            self._receive(at)
            keys.append(key)
            values.append(self._received[start:at])
        return at

    def _skip_contents(self) -> int:
        """Skip what a lone request's contents had beyond their count; return where the call begins.

        Each field of a form is one. No call begins with two zero bytes, for it has `handler`; the length of a content's
        key does, where it has four bytes.
        """
        at = 0
        while self._length.size == _INT.size and self._number(_COUNT, at)[0] == 0:
            at = self._contents(_WRAP, at, [], [])
        return at

    def _has_more(self, at: int) -> bool:
        """Whether bytes lie beyond, or come soon: Java sends a batch and waits for its answer."""
        return len(self._received) > at or bool(select.select([self._source], [], [], _SOON)[0])

    def _string(self, at: int) -> tuple[str | None, int]:
        """Return a string, and where the next field begins."""
        size, start = self._number(self._length, at)
        if size < 0:
            return None, start
        end = start + size
        self._receive(end)
        return self._received[start:end].decode(), end

    def _number(self, number: struct.Struct, at: int) -> tuple[int, int]:
        """Return a number, and where the next field begins."""
        end = at + number.size
        self._receive(end)
        return number.unpack_from(self._received, at)[0], end

    def _receive(self, size: int) -> None:
        """Receive until `size` bytes lie there."""
        while (missing := size - len(self._received)) > 0:
            more = self._source.recv(max(_RECEIVE_BYTES, missing))
            if not more:
                raise ValueError("Connection disconnected")
            self._received += more


def _last_request(properties: Mapping[str | None, str | None]) -> str | None:
    """Return how the contents of a batch's last request begin; None: the call is no batch."""
    size = properties.get("batch_size")
    if not size or not size.isdecimal() or is_of_http(properties):
        return None
    return f"batch_{int(size) - 1:03d}."
