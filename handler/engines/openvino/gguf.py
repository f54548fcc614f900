"""Reads parts of a GGUF file's header.

The `gguf` package parses all of it, with 50,000 tokens and their merges, which takes 1.8 s of a 3 s start.
Format: github.com/ggml-org/ggml, docs/gguf.md, version 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_STRING = 1 << 26  # bytes; a chat template has some thousands
_NEEDED = {b"general.architecture": "model", b"tokenizer.ggml.tokens": "tokenizer"}
_MAX_DIMENSIONS = 4  # ggml's own limit
_PARTS, _ALIGNMENT = b"split.count", b"general.alignment"
_USED = (_PARTS, _ALIGNMENT)  # keys whose values `check_complete` needs
_BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 10: (256, 84)}
_BLOCKS |= {11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 30: (1, 2)}
"""Weights in a block, and its bytes, by ggml's number of the type; others are not read by OpenVINO."""
_LFS_POINTER = b"version https://git-lfs"  # start of the file that a clone without Git LFS has instead


def context_length(path: Path) -> int | None:
    """Return the context length, in tokens; None where the file has none.

    Raises:
        ValueError: not a GGUF file of a known version.
    """
    with path.open("rb") as file:
        _, num_values = _begin(file)
        for key, value in _pairs(file, num_values):
            if key.endswith(b".context_length") and isinstance(value, int):
                return value if value > 0 else None
    return None


def check_complete(path: Path) -> None:
    """Check that the file is whole: OpenVINO would read past its end, and crash or take zeros for weights.

    Raises:
        ValueError: not a GGUF file, one of several parts, or its header describes more than the file holds.
    """
    with path.open("rb") as file:
        num_tensors, num_values = _begin(file)
        values = {key: value if key in _USED else None for key, value in _pairs(file, num_values)}
        for key, what in _NEEDED.items():
            if key not in values:
                raise ValueError(f"{path} holds no {what}: its header lacks {key.decode()}")
        if isinstance(parts := values.get(_PARTS), int) and parts > 1:
            raise ValueError(f"{path} is one of {parts} parts of a model: join them with `llama-gguf-split --merge`")
        last = max((offset + _size(shape, type) for shape, type, offset in _tensors(file, num_tensors)), default=1)
        alignment = values.get(_ALIGNMENT) or 32
        if not isinstance(alignment, int):
            raise ValueError(f"{path} is broken: its alignment is not a number")
        size, needed = path.stat().st_size, -(-file.tell() // alignment) * alignment + last
    if size < needed:
        raise ValueError(f"{path} is cut short: it holds {size:,} bytes, its header describes {needed:,}")


def _size(shape: Sequence[int], type: int) -> int:
    """Return the bytes of a tensor: at least one, where the type is unknown."""
    weights, size = _BLOCKS.get(type, (1, 0))
    return max(1, math.prod(shape) // weights * size)


def matrix_types(path: Path) -> set[int]:
    """Return the types of the matrices' weights, as ggml numbers them.

    Raises:
        ValueError: not a GGUF file of a known version.
    """
    with path.open("rb") as file:
        num_tensors, num_values = _begin(file)
        for _ in _pairs(file, num_values):
            pass  # the tensors come after them
        return {kind for shape, kind, _ in _tensors(file, num_tensors) if len(shape) > 1}


def _pairs(file: BinaryIO, count: int) -> Iterator[tuple[bytes, object]]:
    """Read the key-value pairs; a list's value is None."""
    for _ in range(count):
        yield _string(file), _value(file, _read(file, "I"))


def _tensors(file: BinaryIO, count: int) -> Iterator[tuple[list[int], int, int]]:
    """Read each tensor's shape, its type and its offset."""
    for _ in range(count):
        _string(file)
        if (num_dimensions := _read(file, "I")) > _MAX_DIMENSIONS:
            raise ValueError(f"{file.name} is broken: its header has a tensor of {num_dimensions:,} dimensions")
        shape = [_read(file, "Q") for _ in range(num_dimensions)]
        yield shape, _read(file, "I"), _read(file, "Q")


def _begin(file: BinaryIO) -> tuple[int, int]:
    """Read the start of the header; return the numbers of tensors and of key-value pairs, which follow."""
    magic = file.read(4)
    if magic + file.read(len(_LFS_POINTER) - 4) == _LFS_POINTER:
        raise ValueError(f"{file.name} is a Git LFS pointer, not the model: fetch it with `git lfs pull`")
    if magic != b"GGUF":
        raise ValueError(f"{file.name} is not a GGUF file")
    file.seek(4)
    version = _read(file, "I")
    if version not in (2, 3):
        raise ValueError(f"{file.name} is GGUF version {version}; known are 2 and 3")
    return _read(file, "Q"), _read(file, "Q")


def _read(file: BinaryIO, code: str) -> int:
    size = struct.calcsize(code)
    data = file.read(size)
    if len(data) < size:
        raise ValueError(f"{file.name} ends inside its header")
    return struct.unpack("<" + code, data)[0]  # type: ignore[no-any-return]


def _string(file: BinaryIO) -> bytes:
    length = _read(file, "Q")
    if length > _MAX_STRING:
        raise ValueError(f"{file.name} is broken: its header has a string of {length:,} bytes")
    data = file.read(length)
    if len(data) < length:
        raise ValueError(f"{file.name} ends inside its header")
    return data


def _skip(file: BinaryIO, count: int) -> None:
    if count > os.fstat(file.fileno()).st_size - file.tell():
        raise ValueError(f"{file.name} ends inside its header")
    file.seek(count, 1)


def _value(file: BinaryIO, kind: int) -> object:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        item = _read(file, "I")
        count = _read(file, "Q")
        if item in _SCALARS:
            _skip(file, count * struct.calcsize(_SCALARS[item]))
        elif item == _STRING:
            for _ in range(count):
                _string(file)
        else:
            raise ValueError(f"{file.name} is broken: its header has a list of unknown type {item}")
        return None
    if kind not in _SCALARS:
        raise ValueError(f"{file.name} is broken: its header has a value of unknown type {kind}")
    return _read(file, _SCALARS[kind])
