"""Read a model's shape from the header of a GGUF file (ggml's docs/gguf.md, versions 2 and 3)."""

from __future__ import annotations

import math
import struct
from typing import Any

from deploy.errors import SpecError
from deploy.spec.sections import Shape

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def gguf_shape(head: bytes, size: int) -> Shape:
    """Return the shape.

    Args:
        head: the file's beginning with all tensor names (some MiB: the vocabulary comes first).
        size: bytes of the whole file, about the size of its weights.

    Raises:
        SpecError: it is no GGUF file, or cut short.
    """
    try:
        return _shape(_Cursor(head), size)
    except (struct.error, UnicodeDecodeError, KeyError, IndexError) as error:
        raise SpecError(f"the .gguf file cannot be read: {type(error).__name__}: {error}") from None


class _Cursor:
    """A position in the bytes. Numbers are little-endian."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def text(self) -> str:
        length = self.number("Q")
        start, self._at = self._at, self._at + length
        if self._at > len(self._data):
            raise IndexError("it ends within a text")
        return self._data[start : self._at].decode()

    def value(self, kind: int) -> Any:
        """Read a metadata value: text, number, or a list of either."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            of, length = self.number("I"), self.number("Q")
            return [self.value(of) for _ in range(length)]
        return self.number(_SCALARS[kind])


def _shape(cursor: _Cursor, size: int) -> Shape:
    if cursor.number("4s") != b"GGUF" or cursor.number("I") not in (2, 3):
        raise SpecError("not a GGUF file of version 2 or 3")
    tensors, entries = cursor.number("Q"), cursor.number("Q")
    metadata = {cursor.text(): cursor.value(cursor.number("I")) for _ in range(entries)}
    parameters = 0
    for _ in range(tensors):
        cursor.text()
        parameters += math.prod(cursor.number("Q") for _ in range(cursor.number("I")))
        cursor.number("I"), cursor.number("Q")
    of = metadata["general.architecture"]
    heads = _largest(metadata[f"{of}.attention.head_count"])
    return Shape(
        parameters=float(parameters),
        layers=metadata[f"{of}.block_count"],
        kv_heads=_largest(metadata.get(f"{of}.attention.head_count_kv", heads)),
        head_dim=metadata.get(f"{of}.attention.key_length", metadata[f"{of}.embedding_length"] // heads),
        heads=heads,
        context=metadata.get(f"{of}.context_length"),
        stored=size,
    )


def _largest(value: int | list[int]) -> int:
    """Return the largest: some models have a number of heads for each layer."""
    return max(value) if isinstance(value, list) else value
