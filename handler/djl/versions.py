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
missing, this many more follow. Contents are in the order of the requests: while the last one's are missing too.
A string's length had 16 bits before 0.28: a content's key goes on while no number of bytes comes after it."""

_BATCH = b"batch_"

_NO_SIZE = 0x09000000
"""No content has as many bytes; four of a text's are at least that number."""

_FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")
"""Content types of which each field is a content, with a name and a number that are the client's choice."""

_SOON = 0.5  # seconds in which more of a call comes, where its count leaves open whether any does


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
        self._after_form = False  # more contents of the last message may lie there than its count said

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
        if self._after_form:
            self._skip_contents()
        count, at = self._number(_COUNT, 0)
        properties: dict[str | None, str | None] = {}
        while True:
            for _ in range(count):
                key, at = self._string(at)
                properties[key], at = self._string(at)
            if "handler" in properties:  # Java names the function in each call
                break
            count = _WRAP
        last = _last_request(properties)
        form = _is_form(properties, last)
        count, at = self._number(_COUNT, at)
        keys: list[str | None] = []
        values: list[bytearray] = []
        while True:
            at = self._contents(count, at, keys, values)
            whole = any(key and key.startswith(last) for key in reversed(keys)) if last else not (form and self._short)
            if whole or not self._has_more(at):
                break
            count = _WRAP
        self._after_form = form and not self._short
        return _Message(properties, keys, values, at)

    def _contents(self, count: int, at: int, keys: list[str | None], values: list[bytearray]) -> int:
        """Read `count` contents; return where the next field begins."""
        for _ in range(count):
            key, size, start = self._key(at)
            at = start + size
            self._receive(at)
            keys.append(key)
            values.append(self._received[start:at])
        return at

    def _key(self, at: int) -> tuple[str | None, int, int]:
        """Return a content's key, the number of its value's bytes, and where they begin."""
        length, start = self._number(self._length, at)
        if length < -1:
            length += _WRAP
        size, begin = self._number(_INT, start + max(length, 0))
        while self._short and not 0 <= size < _NO_SIZE:
            length += _WRAP
            size, begin = self._number(_INT, start + length)
        return None if length < 0 else self._received[start : start + length].decode(), size, begin

    def _skip_contents(self) -> None:
        """Skip what a form had beyond its count.

        Java puts no mark between calls. One begins with the number of its properties and the length of a key, which are
        small; the number is 0 where it was cut, in a batch. A content begins with the length of its key, in four bytes.
        """
        while True:
            count, at = self._number(_COUNT, 0)
            size, at = self._number(_INT, at)
            self._receive(at + len(_BATCH))
            if 0 <= size < _WRAP and (count or self._received.startswith(_BATCH, at)):
                return
            del self._received[: self._contents(_WRAP, 0, [], [])]

    @property
    def _short(self) -> bool:
        """Whether a string's length has 16 bits. Then Java waits for the answer to each call."""
        return self._length.size == 2

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


def _last_request(properties: Mapping[str | None, str | None]) -> str:
    """Return how the contents of a batch's last request begin; "" where the call is no batch."""
    size = properties.get("batch_size")
    if not size or not size.isdecimal() or is_of_http(properties):
        return ""
    return f"batch_{int(size) - 1:03d}."


def _is_form(properties: Mapping[str | None, str | None], prefix: str) -> bool:
    """Whether the request whose properties begin so is a form."""
    name = f"{prefix}content-type"
    kinds = [value.lower() for key, value in properties.items() if key and value and key.lower() == name]
    return any(kind.startswith(_FORMS) for kind in kinds)
