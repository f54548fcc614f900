"""A model's shape from the headers of GGUF files (ggml's docs/gguf.md, versions 2 and 3)."""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from deploy.errors import SpecError
from deploy.resolve.model.files import Files
from deploy.spec.sections import Shape
from deploy.spec.values import Precision
from handler.config.gguf import first_values, read_header

HEAD = 32 << 20
"""Number of bytes to read from the beginning of a file. The header includes the vocabulary, so it can be large."""

_MOST_LAYERS = 4096

_PRECISIONS: dict[int, Precision] = {0: "fp32", 1: "fp16", 30: "bf16", 8: "int8", 9: "int8", 15: "int8", 39: "mxfp4"}
"""Maps the ggml ID of each tensor type to its precision. All other types (Q2_K to Q6_K, IQ…) count as int4."""

_START = 4096
"""Number of bytes at the beginning of a file that show what the file contains."""

_PART = re.compile(r"-([0-9]{5})-of-([0-9]{5})\.gguf$")


def parts(files: Files, name: str | None = None) -> list[str]:
    """Return the names of the files of one GGUF model. A split model has several files.

    Args:
        files: the files to choose from.
        name: name of a file of the model, or None to choose the first model.
    """
    names = sorted(item for item in files.sizes if item.endswith(".gguf") and not item.startswith("."))
    if name is None and len(names) > 1:
        names = [item for item in names if not _stands_beside(_Head(files, item, _START))]
    first = name if name in names else None if name is not None else next(iter(names), None)
    if first is None or (match := _PART.search(first)) is None:
        return [] if first is None else [first]
    stem, end = first[: match.start()], f"-of-{match[2]}.gguf"
    return [item for item in names if item.startswith(f"{stem}-") and item.endswith(end) and _PART.search(item)]


def _stands_beside(head: _Head) -> bool:
    """Return whether the first entries of a file show that it is a vision projector or an adapter, not a model."""
    with contextlib.suppress(ValueError):
        for key, value in first_values(head):
            if (key, value) == (b"general.architecture", b"clip") or (key == b"general.type" and value != b"model"):
                return True
    return False


def gguf_shape(files: Files, names: Sequence[str]) -> Shape:
    """Return the shape of a model from its GGUF files.

    Raises:
        SpecError: a file is not a GGUF file, or is incomplete.
    """
    metadata: Mapping[bytes, object] = {}
    weights: Counter[int] = Counter()
    for name in names:
        try:
            header = read_header(_Head(files, name, HEAD))
        except ValueError as error:
            raise SpecError(f"the .gguf file cannot be read: {error}") from None
        for shape, kind in header.tensors:
            weights[kind] += math.prod(shape)
        metadata = metadata or header.values
    return _shape(_Metadata(metadata), weights, sum(files.sizes[name] for name in names))


class _Head(io.BytesIO):
    """The beginning of a file, as a file object whose name appears in error messages."""

    def __init__(self, files: Files, name: str, length: int) -> None:
        super().__init__(files.read(name, 0, length))
        self.name = name


class _Metadata:
    """The entries of a header that concern the model's architecture. Names do not include the architecture prefix."""

    def __init__(self, values: Mapping[bytes, object]) -> None:
        architecture = values.get(b"general.architecture")
        self._prefix = architecture.decode("utf-8", "replace") if isinstance(architecture, bytes) else None
        self._values = values

    def get(self, name: str) -> object:
        return self._values.get(f"{self._prefix}.{name}".encode())

    def number(self, name: str, default: int | None = None) -> int:
        """Return a number, or the maximum of a list of numbers."""
        value = default if (entry := self.get(name)) is None else entry
        value = max(value, default=0) if isinstance(value, list) else value
        if not isinstance(value, int) or not 0 <= value <= 1 << 31:
            raise SpecError(f"the .gguf file has an invalid {self._prefix}.{name}: {value!r}")
        return value

    def count(self, name: str, layers: int, *, zeros: bool) -> int:
        """Count the layers that are zero in a list, or non-zero if `zeros` is false. Return 0 if there is no list."""
        values = self.get(name)
        return sum((not value) == zeros for value in values[:layers]) if isinstance(values, list) else 0


def _shape(metadata: _Metadata, weights: Counter[int], size: int) -> Shape:
    layers, heads = metadata.number("block_count"), metadata.number("attention.head_count")
    if not 0 < layers <= _MOST_LAYERS or not heads or not weights.total():
        raise SpecError(f"the .gguf file is invalid: {layers} layers, {heads} heads, {weights.total()} weights")
    kv_heads, head_dim = metadata.number("attention.head_count_kv", heads), metadata.number("attention.key_length", 0)
    if metadata.get("attention.kv_lora_rank") is not None:  # latent attention: one vector for K and V
        values = metadata.number("attention.kv_lora_rank") + metadata.number("rope.dimension_count", 0)
        kv_heads, head_dim = 1, (values + 1) // 2
    uncached = metadata.count("attention.head_count_kv", layers, zeros=True)
    window = metadata.number("attention.sliding_window", 0)
    windowed = metadata.count("attention.sliding_window_pattern", layers, zeros=False) if window else 0
    return Shape(
        parameters=float(weights.total()),
        layers=layers,
        kv_heads=kv_heads or heads,
        head_dim=head_dim or max(1, metadata.number("embedding_length") // heads),
        heads=heads,
        context=metadata.number("context_length", 0) or None,
        window_layers=min(windowed, layers - uncached),
        window=window if windowed else None,
        uncached_layers=uncached,
        dtype=_precision(weights),
        stored=size,
    )


def _precision(weights: Counter[int]) -> Precision:
    """Return the precision of most weights."""
    precisions: Counter[Precision] = Counter()
    for kind, count in weights.items():
        precisions[_PRECISIONS.get(kind, "int4")] += count
    return precisions.most_common(1)[0][0]
