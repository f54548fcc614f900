"""Read a model's shape from the headers of GGUF files (ggml's docs/gguf.md, versions 2 and 3)."""

from __future__ import annotations

import contextlib
import math
import re
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any

from deploy.errors import SpecError
from deploy.resolve.model.files import Files
from deploy.spec.sections import Shape
from deploy.spec.values import Precision

HEAD = 32 << 20
"""Bytes of a file's beginning that are read: the vocabulary comes first."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_KEPT = 4096
"""Numbers of an array that are kept: the longest wanted have one for each layer."""

_PRECISIONS: dict[int, Precision] = {0: "fp32", 1: "fp16", 30: "bf16", 8: "int8", 9: "int8", 15: "int8", 39: "mxfp4"}
"""Precisions by ggml's number of a tensor's type. All others (Q2_K to Q6_K, IQ…) count as int4."""

_START = 4096
"""Bytes of a file in which it says what it is."""

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def parts(files: Files, name: str | None = None) -> list[str]:
    """Return the names of one GGUF model: the named file, else the first, with the other parts of a split one."""
    found = sorted(item for item in files.sizes if item.endswith(".gguf") and not item.startswith("."))
    if name is None and len(found) > 1:
        found = [item for item in found if not _stands_beside(_Cursor(files.read(item, 0, _START)))]
    first = name if name in found else None if name is not None else next(iter(found), None)
    if first is None or (match := _PART.search(first)) is None:
        return [] if first is None else [first]
    stem, end = first[: match.start()], f"-of-{match[2]}.gguf"
    return [item for item in found if item.startswith(f"{stem}-") and item.endswith(end) and _PART.search(item)]


def _stands_beside(cursor: _Cursor) -> bool:
    """Return whether a file's first entries say that it is a vision projector, an adapter or the like."""
    with contextlib.suppress(struct.error, UnicodeDecodeError, KeyError, IndexError):  # the beginning ends within one
        _, entries = _begin(cursor)
        for _ in range(entries):
            said = cursor.text(), cursor.value(cursor.number("I"))
            if said == ("general.architecture", "clip") or (said[0] == "general.type" and said[1] != "model"):
                return True
    return False


def gguf_shape(files: Files, names: Sequence[str]) -> Shape:
    """Return the shape of a model in one file, or in several parts.

    Raises:
        SpecError: one is no GGUF file, or cut short.
    """
    metadata: dict[str, Any] = {}
    weights: Counter[int] = Counter()
    for name in names:
        try:
            said = _read(_Cursor(files.read(name, 0, HEAD)), weights)
        except (struct.error, UnicodeDecodeError, KeyError, IndexError) as error:
            raise SpecError(f"{name}: the .gguf file cannot be read: {type(error).__name__}: {error}") from None
        metadata = metadata or said
    return _shape(metadata, weights, sum(files.sizes[name] for name in names))


class _Cursor:
    """A position in the bytes. Numbers are little-endian."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def skip(self, length: int) -> bytes:
        start, self._at = self._at, self._at + length
        if self._at > len(self._data):
            raise IndexError("it ends within a text or a list")
        return self._data[start : self._at]

    def text(self) -> str:
        return self.skip(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        """Read a metadata value: text, number, or a list of numbers. Lists of texts are skipped: the vocabulary."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        of, length = self.number("I"), self.number("Q")
        if of == _STRING:
            for _ in range(length):
                self.skip(self.number("Q"))
            return []
        code = _SCALARS[of]  # an array of arrays is nothing that a model has: KeyError
        data = self.skip(length * struct.calcsize(f"<{code}"))
        return list(struct.unpack(f"<{length}{code}", data)) if length <= _KEPT else []


def _begin(cursor: _Cursor) -> tuple[int, int]:
    """Return the numbers of tensors and of entries."""
    if cursor.number("4s") != b"GGUF" or cursor.number("I") not in (2, 3):
        raise SpecError("not a GGUF file of version 2 or 3")
    return cursor.number("Q"), cursor.number("Q")


def _read(cursor: _Cursor, weights: Counter[int]) -> dict[str, Any]:
    """Return a file's metadata, and add its tensors' weights by type."""
    tensors, entries = _begin(cursor)
    metadata = {cursor.text(): cursor.value(cursor.number("I")) for _ in range(entries)}
    for _ in range(tensors):
        cursor.text()
        dimensions = cursor.number("I")
        if dimensions > 8:
            raise IndexError(f"a tensor has {dimensions} dimensions")
        number = math.prod(cursor.number("Q") for _ in range(dimensions))
        weights[cursor.number("I")] += number
        cursor.number("Q")
    return metadata


def _shape(metadata: dict[str, Any], weights: Counter[int], size: int) -> Shape:
    of = metadata.get("general.architecture")

    def number(name: str, default: int | None = None) -> int:
        value = metadata.get(f"{of}.{name}", default)
        value = max(value, default=0) if isinstance(value, list) else value
        if not isinstance(value, int) or not 0 <= value <= 1 << 31:
            raise SpecError(f"the .gguf file: {of}.{name}: {value!r} is not a number that a model can have")
        return value

    layers, heads = number("block_count"), number("attention.head_count")
    if not 0 < layers <= _KEPT or not heads or not weights.total():
        raise SpecError(f"the .gguf file: {layers} layers, {heads} heads, {weights.total()} weights cannot be")
    kv_heads, head_dim = number("attention.head_count_kv", heads), number("attention.key_length", 0)
    if f"{of}.attention.kv_lora_rank" in metadata:  # latent attention: one vector for K and V
        kv_heads, head_dim = 1, (number("attention.kv_lora_rank") + number("rope.dimension_count", 0) + 1) // 2
    of_layers = metadata.get(f"{of}.attention.head_count_kv")
    uncached = sum(item == 0 for item in of_layers[:layers]) if isinstance(of_layers, list) else 0
    window = number("attention.sliding_window", 0)
    pattern = metadata.get(f"{of}.attention.sliding_window_pattern")
    windowed = sum(map(bool, pattern[:layers])) if window and isinstance(pattern, list) else 0
    precisions: Counter[Precision] = Counter()
    for kind, count in weights.items():
        precisions[_PRECISIONS.get(kind, "int4")] += count
    return Shape(
        parameters=float(weights.total()),
        layers=layers,
        kv_heads=kv_heads or heads,
        head_dim=head_dim or max(1, number("embedding_length") // heads),
        heads=heads,
        context=number("context_length", 0) or None,
        window_layers=min(windowed, layers - uncached),
        window=window if windowed else None,
        uncached_layers=uncached,
        dtype=precisions.most_common(1)[0][0],
        stored=size,
    )
