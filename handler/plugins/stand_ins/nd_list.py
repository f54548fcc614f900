"""DJL's binary format for a list of arrays (`tensor/ndlist`), for a model.py that uses NumPy.

Numbers are big-endian. A string is encoded as its length in two bytes, followed by its UTF-8 bytes. A list is encoded
as the number of arrays, followed by the arrays. An array consists of the string NDAR, a version, a flag, a name if the
flag is set, a sparse format, the name of the type, the dimensions, a layout letter for each dimension, the byte order
of the data, the size of the data, and the data.
"""

from __future__ import annotations

import importlib
import io
import math
import struct
from typing import Any

_MAGIC, _VERSION = "NDAR", 3
_NPZ = b"PK"


def to_nd_list(np_list: Any) -> bytearray:
    """Encode an array or a list of arrays."""
    arrays = np_list if isinstance(np_list, list) else [np_list]
    return bytearray(struct.pack(">i", len(arrays)) + b"".join(map(_encode, arrays)))


def from_nd_list(encoded: bytes | bytearray) -> list[Any]:
    """Decode a list of arrays, in DJL's format or in NumPy's npz format.

    Raises:
        ValueError: if the data has neither format.
    """
    numpy = importlib.import_module("numpy")
    if bytes(encoded[:2]) == _NPZ:
        with numpy.load(io.BytesIO(encoded)) as arrays:
            return [arrays[name] for name in arrays.files]
    reader = _Reader(encoded)
    return [reader.array(numpy) for _ in range(reader.number(">i"))]


def _encode(array: Any) -> bytes:
    little = array.astype(array.dtype.newbyteorder("<"), order="C")
    data: bytes = little.tobytes("C")
    dimensions = array.shape
    return b"".join(
        [
            _text(_MAGIC),
            struct.pack(">ib", _VERSION, 0),  # without a name
            _text("default"),
            _text(str(array.dtype.name).upper()),
            struct.pack(f">i{len(dimensions)}q", len(dimensions), *dimensions),
            struct.pack(">i", len(dimensions)) + "?".encode("utf-16-be") * len(dimensions),
            b"<" + struct.pack(">i", len(data)),
            data,
        ]
    )


def _text(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


class _Reader:
    def __init__(self, data: bytes | bytearray) -> None:
        self._data = memoryview(data)
        self._place = 0

    def array(self, numpy: Any) -> Any:
        if (magic := self._text()) != _MAGIC:
            raise ValueError(f"not a list of arrays: expected {_MAGIC}, found {magic[:20]!r}")
        if (version := self.number(">i")) != _VERSION:
            raise ValueError(f"the list of arrays has version {version}; only version {_VERSION} is supported")
        if self.number(">b"):
            self._text()  # the array's name
        self._text()  # the sparse format
        kind = self._text().lower()
        shape = [self.number(">q") for _ in range(self.number(">i"))]
        self._bytes(2 * self.number(">i"))  # the layout
        order = chr(self.number(">b"))
        data = self._bytes(self.number(">i"))
        try:
            dtype = numpy.dtype(kind).newbyteorder(order)
        except TypeError:
            raise ValueError(f"an array has the unknown type {kind[:20]!r}") from None
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
            raise ValueError(f"an array of shape {shape} and type {kind} cannot have {len(data)} bytes")
        return numpy.frombuffer(data, dtype).reshape(shape).copy()  # a copy, which the user may change

    def number(self, format: str) -> int:
        (value,) = struct.unpack(format, self._bytes(struct.calcsize(format)))
        return int(value)

    def _text(self) -> str:
        return str(self._bytes(self.number(">h")), "utf-8")

    def _bytes(self, count: int) -> memoryview:
        data = self._data[self._place : self._place + count]
        if count < 0 or len(data) != count:
            raise ValueError("the list of arrays is truncated inside an array")
        self._place += count
        return data
