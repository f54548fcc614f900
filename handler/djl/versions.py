"""Differences between versions of DJL Serving, and a faster way to receive what djl_python reads."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import djl_python
from djl_python import Input, Output

from handler.config import environment

MAX_FIELD = environment.netty_buffer_bytes() // 2  # room for what is around it
"""Bytes of a field that Java takes; with a larger one it gives the worker up, and everybody in it."""

_RECEIVE_BYTES = 1 << 16  # Python makes room for as many at each call

_SHORT, _INT = struct.Struct(">h"), struct.Struct(">i")


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
    """

    length: struct.Struct
    json_errors: bool
    commits_early: bool
    always_steps: bool
    steps_all_ranks: bool
    passes_headers: bool

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
    )


def read_ahead(version: DjlVersion) -> None:
    """Have djl_python read an Input by a `Reader`."""
    reader = Reader(version.length)
    Input.read = lambda inputs, conn: reader.read(inputs, conn)


class _Incomplete(Exception):
    """A message has at least `size` bytes."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


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
        """Fill an Input from the connection, as its own `read` does."""
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
        while True:
            try:
                return self._parse(self._received)
            except _Incomplete as error:
                self._receive(error.size)

    def _receive(self, size: int) -> None:
        """Receive until `size` bytes lie there."""
        while (missing := size - len(self._received)) > 0:
            more = self._source.recv(max(_RECEIVE_BYTES, missing))
            if not more:
                raise ValueError("Connection disconnected")
            self._received += more

    def _parse(self, data: bytearray) -> _Message:
        try:
            (count,), at = _SHORT.unpack_from(data), _SHORT.size
            properties = {}
            for _ in range(count):
                key, at = self._string(data, at)
                properties[key], at = self._string(data, at)
            (count,) = _SHORT.unpack_from(data, at)
            at += _SHORT.size
            keys, values = [], []
            for _ in range(count):
                key, start = self._string(data, at)
                start += _INT.size
                at = start + _INT.unpack_from(data, start - _INT.size)[0]
                if at > len(data):
                    raise _Incomplete(at)
                keys.append(key)
                values.append(data[start:at])
        except struct.error:  # it ends amid a number, or before it
            raise _Incomplete(len(data) + 1) from None
        return _Message(properties, keys, values, at)

    def _string(self, data: bytearray, at: int) -> tuple[str | None, int]:
        """Return a string, and where the next field begins."""
        start = at + self._length.size
        size = self._length.unpack_from(data, at)[0]
        if size < 0:
            return None, start
        end = start + size
        if end > len(data):
            raise _Incomplete(end)
        return data[start:end].decode(), end
