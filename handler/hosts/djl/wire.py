"""The bytes of DJL's worker protocol, and the requests in an Input (contract djl.md, sections 1.2 to 1.4).

Versions differ in how wide a string's length is, in how a request's failure gets its HTTP status, and in whether a
first piece without bytes begins the answer; `Dialect` says which is which, and nothing else asks.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import djl_python
from djl_python import Input, Output

from handler.errors import ServingError
from handler.framing import dumps
from handler.hosts.intake import ignored_header
from handler.hosts.rolling import Piece
from handler.hosts.steps import MAX_REASON, Item, Place
from handler.schemas.base import front_end_error

_RECEIVE_BYTES = 1 << 16  # Python makes room for as many at each call

_BATCH_SIZE, _BATCH_KEY = re.compile(r"[1-9]\d{0,2}"), re.compile(r"batch_\d{3}\.")

_COUNT, _SIZE = struct.Struct(">h"), struct.Struct(">i")


class Dialect(NamedTuple):
    """What differs between versions of DJL Serving.

    Attributes:
        length: of a string: two bytes before 0.28, four since.
        json_errors: a piece that is JSON of `data` and `last`, where `data` is JSON with `code` and `error`, sets the
            request's status and keeps the body; since 0.29 `code` and `error` in the piece's map do, and make the body.
    """

    version: tuple[int, ...]
    length: struct.Struct
    json_errors: bool

    @property
    def max_piece(self) -> int | None:
        return 32_000 if self.length.size == 2 else None

    def string(self, text: bytes) -> bytes:
        return self.length.pack(len(text)) + text


def dialect() -> Dialect:
    """That of the djl_python that runs us."""
    probe = bytearray()
    Output.write_utf8(probe, "")
    version = tuple(int(part) for part in djl_python.__version__.split("-")[0].split(".")[:2])
    return Dialect(version, struct.Struct(">h" if len(probe) == 2 else ">i"), version < (0, 29))


def read_ahead() -> None:
    """Have djl_python receive what lies there at once, not each field of a request by itself.

    A continuing request has three fields and no bytes; 128 of them are 400 system calls a step. The meaning stays:
    `length` bytes of the connection, in order; what came beyond them is the beginning of the next ones.
    """
    received, at, source = bytearray(), 0, None

    def retrieve_buffer(conn: Any, length: int) -> bytearray:
        nonlocal received, at, source
        end = at + length
        if conn is not source or end > len(received):
            if conn is not source:
                received, at, source = bytearray(), 0, conn
            del received[:at]
            at, end = 0, length
            while len(received) < length:
                more = conn.recv(max(_RECEIVE_BYTES, length - len(received)))
                if not more:
                    raise ValueError("Connection disconnected")
                received += more
        field = received[at:end]
        at = end
        return field

    djl_python.inputs.retrieve_buffer = retrieve_buffer


class Sent(Output):  # type: ignore[misc]
    """An answer that is already in bytes, written at once: djl_python asks no more of it than `send`."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._data = data

    def send(self, cl_socket: Any) -> None:
        cl_socket.sendall(self._data)


class PieceWriter:
    """Makes the bytes of a step: a map of strings for each request, and the headers of those that begin."""

    def __init__(self, dialect: Dialect) -> None:
        string = dialect.string
        self._dialect = dialect
        self._start = _COUNT.pack(200) + string(b"OK")
        self._map = _COUNT.pack(2) + string(b"data")
        self._more = string(b"last") + string(b"false")
        self._last = string(b"last") + string(b"true")
        self._key = string(b"data")

    def step(self, pieces: Sequence[Piece]) -> bytes:
        """The whole answer to a step."""
        headers: list[bytes] = []
        values: list[bytes] = []
        string, length = self._dialect.string, self._dialect.length
        around = len(self._map) + length.size + len(self._more)
        key, size, more = self._key, _SIZE.pack, self._more
        for index, piece in enumerate(pieces):
            if piece.first or piece.last:
                value = self.value(piece)
                values.append(key + size(len(value)) + value)
                for name, text in headers_of(piece.place).items() if piece.first else ():
                    headers.append(string(f"batch_{index}_{name}".encode()) + string(text.encode()))
            else:  # nearly every piece
                data = piece.data
                num = len(data)
                values += (key, size(around + num), self._map, length.pack(num), data, more)
        return b"".join((self._start, _COUNT.pack(len(headers)), *headers, _COUNT.pack(len(pieces)), *values))

    def value(self, piece: Piece) -> bytes:
        """What Java reads of one request."""
        if piece.first and piece.place.error is not None:
            return self.failure(piece.place.error, piece.data)
        return self.piece(piece.data, last=piece.last)

    def piece(self, data: bytes, *, last: bool) -> bytes:
        end = self._last if last else self._more
        return b"".join((self._map, self._dialect.length.pack(len(data)), data, end))

    def failure(self, error: ServingError, body: bytes) -> bytes:
        """Nothing was sent of this request: its HTTP status can still be its own."""
        if self._dialect.json_errors:
            return dumps({"data": body.decode(), "last": True})
        fields = {"data": "", "last": "true", "code": str(error.status), "error": reason(error)}
        string = self._dialect.string
        return _COUNT.pack(len(fields)) + b"".join(string(k.encode()) + string(v.encode()) for k, v in fields.items())


def single(inputs: Input) -> Item:
    """A request that is alone in its Input; query parameters lie beside its body."""
    headers = {str(key).lower(): str(value) for key, value in inputs.get_properties().items()}
    content = inputs.get_content()
    body = content.get("data")
    if body is None:
        body = content.value_at(0) if content.size() else b""
    return Item(bytes(body), headers)


def is_batch(inputs: Input) -> bool:
    """Whether Java put several requests into this Input.

    A request that is alone has its client's headers for properties and its query's names for keys: one may be called
    `batch_size`, the others as they like.
    """
    size = inputs.get_properties().get("batch_size", "")
    keys = inputs.get_content().get_keys()
    return bool(_BATCH_SIZE.fullmatch(size) and keys and all(map(_BATCH_KEY.match, keys)))


def batched(inputs: Input) -> dict[int, Item]:
    """The requests of a batch that have something in it, by their place.

    In a rolling batch those are the new ones: of the others the Java side sends nothing but an empty body.
    """
    content = inputs.get_content()
    keys, values = content.get_keys(), content.get_values()
    properties = inputs.get_properties()
    if len(keys) == int(properties["batch_size"]) and not any(values):
        return {}
    bodies: dict[int, bytes] = {}
    for key, value in zip(keys, values, strict=True):
        index, name = int(key[6:9]), key[10:]
        if name == "data" and value:
            bodies[index] = bytes(value)
        elif name == "seed":
            bodies.setdefault(index, b"")
    headers: dict[int, dict[str, str]] = {index: {} for index in bodies}
    for key, value in properties.items():
        if key.startswith("batch_") and key != "batch_size" and (index := int(key[6:9])) in headers:
            headers[index][key[10:].lower()] = value
    return {index: Item(body, headers[index]) for index, body in bodies.items()}


def headers_of(place: Place) -> dict[str, str]:
    return {"Content-Type": place.content_type, **ignored_header(place.ignored)}


def refusal(error: ServingError) -> Output:
    """A whole answer outside of any batch."""
    output = Output(code=error.status, message=reason(error))
    return output.add_property("Content-Type", "application/json").add(dumps(front_end_error(error)), key="data")


def reason(error: ServingError) -> str:
    """An error as an HTTP reason phrase, where a line break would end the head."""
    return " ".join(error.message.split())[:MAX_REASON]
