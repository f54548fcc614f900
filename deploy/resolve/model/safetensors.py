"""Count weights by the headers of safetensors files: 8 bytes of length, then names, types and shapes as JSON."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from deploy.errors import SpecError
from deploy.resolve.model.files import Files

_LARGEST_HEADER = 25_000_000
"""Bytes, as huggingface_hub reads. The format allows 100 MB."""

_FIRST = 128 << 10
"""Bytes of a file that are read first: most headers are shorter."""

_MOST_FILES = 256
_THREADS = 8
_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FN": 8, "I8": 8, "U8": 8, "BOOL": 8, "F6_E2M3": 6, "F6_E3M2": 6,
    "F4": 4, "C64": 64,
}  # fmt: skip
_BESIDE = re.compile(
    r"(scales?|scale_inv|scale_2|_scale_\w+|zeros|zero_point|g_idx|weight_shape|absmax|quant_map|quant_state\S*|"
    r"input_scale|[kv]_scale|inv_freq|perm)$"
)
"""Names of tensors that are no weights, but say how others are quantized."""

_PACKED = ("qweight", "weight_packed", "_blocks")
"""Ends of names of tensors that hold several weights in each number."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,5})\.")


@dataclass(frozen=True)
class Contents:
    """What the files hold.

    Attributes:
        parameters: number of weights; packed ones are counted singly.
        stored: bytes of all tensors.
        layers: the highest number of a layer, and one; 0: none is numbered.
    """

    parameters: float
    stored: int
    layers: int


def contents(files: Files, names: Iterable[str], bits: int | None = None) -> Contents:
    """Read the headers.

    Args:
        bits: of a packed weight; None: 4.

    Raises:
        SpecError: a header lies, or there are too many files.
    """
    wanted = list(names)
    if len(wanted) > _MOST_FILES:
        raise SpecError(f"{len(wanted)} safetensors files: the headers of at most {_MOST_FILES} are read")
    with ThreadPoolExecutor(_THREADS) as threads:
        found = list(threads.map(lambda name: _tensors(files, name, bits or 4), wanted))
    return Contents(
        sum(one.parameters for one in found), sum(one.stored for one in found), max(one.layers for one in found)
    )


def _tensors(files: Files, name: str, bits: int) -> Contents:
    size = files.sizes[name]
    parameters, end, layers = 0.0, 0, 0
    header, length = _header(files, name, size)
    for tensor, said in header.items():
        if tensor == "__metadata__":
            continue
        if not isinstance(said, Mapping):
            raise SpecError(f"{name}: the header's {tensor[:100]!r} is not an object")
        number, span = _numbers(name, tensor, said, size - 8 - length)
        parameters += _weights(tensor, str(said.get("dtype")), number, bits)
        end = max(end, span)
        # A draft of further tokens is a layer of its own, and media have layers, too
        if (place := _LAYER.search(tensor)) and not re.search(r"vis|audio|mtp|draft", tensor):
            layers = max(layers, int(place[1]) + 1)
    return Contents(parameters, end, layers)


def _header(files: Files, name: str, size: int) -> tuple[Mapping[str, Any], int]:
    """Return the header's content, and its length."""
    start = files.read(name, 0, _FIRST)
    length = struct.unpack_from("<Q", start)[0] if len(start) >= 8 else -1
    if not 2 <= length <= size - 8:
        said = "no header" if length < 0 else f"a header of {length} bytes"
        raise SpecError(f"{name} has {said}, and the file has {size} bytes")
    if length > _LARGEST_HEADER:
        raise SpecError(f"{name}: the header has {length} bytes, and {_LARGEST_HEADER} are read at most")
    content = start[8 : 8 + length]
    if len(content) < length:
        content += files.read(name, len(start), length - len(content))
    try:
        header = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{name}: the header is not JSON: {type(error).__name__}") from None
    if not isinstance(header, dict):
        raise SpecError(f"{name}: the header is not a JSON object")
    return header, length


def _numbers(name: str, tensor: str, said: Mapping[str, Any], room: int) -> tuple[int, int]:
    """Return how many numbers a tensor has, and where it ends; its shape must agree with its bytes."""
    shape, offsets, bits = said.get("shape"), said.get("data_offsets"), _BITS.get(str(said.get("dtype")))
    if (
        not (isinstance(shape, list) and isinstance(offsets, list) and len(shape) <= 8 and len(offsets) == 2)
        or not all(isinstance(item, int) and 0 <= item < 1 << 48 for item in (*shape, *offsets))
        or not offsets[0] <= offsets[1] <= room
    ):
        raise SpecError(f"{name}: the header's {tensor[:100]!r} has no valid shape, or lies outside of the file")
    number = math.prod(shape)
    if bits is not None and (number * bits + 7) // 8 != offsets[1] - offsets[0]:
        raise SpecError(f"{name}: {tensor[:100]!r} has {number} numbers and {offsets[1] - offsets[0]} bytes")
    return number, offsets[1]


def _weights(tensor: str, dtype: str, number: int, bits: int) -> float:
    """Return the weights of a tensor. Integers hold several: 4-bit ones are in U8 or I32."""
    if _BESIDE.search(tensor):
        return 0.0
    width = _BITS.get(dtype, bits)
    packed = tensor.endswith(_PACKED) or (dtype == "U8" and tensor.endswith("weight"))
    return number * (width / bits) if packed and dtype in ("U8", "I8", "I32", "U32", "I64") else float(number)
