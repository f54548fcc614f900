"""Read a model's shape from the headers of GGUF files (ggml's docs/gguf.md, versions 2 and 3)."""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from deploy.errors import SpecError
from deploy.resolve.model.files import Files
from deploy.spec.sections import Shape
from deploy.spec.values import Precision
from handler.config.gguf import Head, begin, pairs, tensors

HEAD = 32 << 20
"""Bytes of a file's beginning that are read: the vocabulary comes first."""

_MOST_LAYERS = 4096

_PRECISIONS: dict[int, Precision] = {0: "fp32", 1: "fp16", 30: "bf16", 8: "int8", 9: "int8", 15: "int8", 39: "mxfp4"}
"""Precisions by ggml's number of a tensor's type. All others (Q2_K to Q6_K, IQ…) count as int4."""

_START = 4096
"""Bytes of a file in which it says what it is."""

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def parts(files: Files, name: str | None = None) -> list[str]:
    """Return the names of one GGUF model: the named file, else the first, with the other parts of a split one."""
    found = sorted(item for item in files.sizes if item.endswith(".gguf") and not item.startswith("."))
    if name is None and len(found) > 1:
        found = [item for item in found if not _stands_beside(item, files.read(item, 0, _START))]
    first = name if name in found else None if name is not None else next(iter(found), None)
    if first is None or (match := _PART.search(first)) is None:
        return [] if first is None else [first]
    stem, end = first[: match.start()], f"-of-{match[2]}.gguf"
    return [item for item in found if item.startswith(f"{stem}-") and item.endswith(end) and _PART.search(item)]


def _stands_beside(name: str, start: bytes) -> bool:
    """Return whether a file's first entries say that it is a vision projector, an adapter or the like."""
    file = Head(name, start)
    _, count = _begin(file)
    with contextlib.suppress(ValueError):  # the beginning ends within one
        for key, value in pairs(file, count):
            if (key, value) == (b"general.architecture", b"clip") or (key == b"general.type" and value != b"model"):
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
            said = _read(Head(name, files.read(name, 0, HEAD)), weights)
        except ValueError as error:
            raise SpecError(f"the .gguf file cannot be read: {error}") from None
        metadata = metadata or said
    return _shape(metadata, weights, sum(files.sizes[name] for name in names))


def _begin(file: Head) -> tuple[int, int]:
    """Return the numbers of tensors and of entries."""
    try:
        return begin(file)
    except ValueError as error:
        raise SpecError(str(error)) from None


def _read(file: Head, weights: Counter[int]) -> dict[str, Any]:
    """Return a file's metadata, and add its tensors' weights by type."""
    num_tensors, num_entries = _begin(file)
    found = {key.decode(): value for key, value in pairs(file, num_entries)}
    for shape, kind, _ in tensors(file, num_tensors):
        weights[kind] += math.prod(shape)
    return {key: value.decode() if isinstance(value, bytes) else value for key, value in found.items()}


def _shape(metadata: dict[str, Any], weights: Counter[int], size: int) -> Shape:
    of = metadata.get("general.architecture")

    def number(name: str, default: int | None = None) -> int:
        value = metadata.get(f"{of}.{name}", default)
        value = max(value, default=0) if isinstance(value, list) else value
        if not isinstance(value, int) or not 0 <= value <= 1 << 31:
            raise SpecError(f"the .gguf file: {of}.{name}: {value!r} is not a number that a model can have")
        return value

    layers, heads = number("block_count"), number("attention.head_count")
    if not 0 < layers <= _MOST_LAYERS or not heads or not weights.total():
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
