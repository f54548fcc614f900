"""The precision of a checkpoint: which parts are quantized, and how many bytes each weight needs with its scales."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deploy.errors import SpecError
from deploy.resolve.model.files import Config, Files, part, whole_number
from deploy.resolve.model.weights import Part, Weights
from deploy.spec.values import Precision

WIDTH: Mapping[str, float] = {
    "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "mxfp4": 0.53125, "fp4": 0.5625, "int4": 0.5625,
}  # fmt: skip
"""Bytes per weight, including scales. mxfp4 has an 8-bit scale for every 32 weights, and fp4 (NVFP4) for every 16."""

_CHECKPOINT: Mapping[str, Precision] = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8",
}

_NEVER_QUANTIZED: tuple[Part, ...] = ("embeddings", "head", "router", "media")

_WORDS: tuple[tuple[str, Part], ...] = (
    ("router", "router"),
    ("mlp.gate.", "router"),
    ("shared_expert", "shared"),
    (".experts", "experts"),
    ("attn", "attention"),
    ("attention", "attention"),
    ("mamba", "attention"),
    ("mlp", "dense"),
    ("feed_forward", "dense"),
)
"""Maps words in the names of modules to parts of the model. The first matching word is used."""

_NUMBERED_LAYER = re.compile(r"layers[.]([0-9]{1,4})[.]")


@dataclass(frozen=True)
class Quantization:
    """The quantization of a checkpoint.

    Attributes:
        dtype: precision of the quantized weights, or of all weights if the checkpoint is not quantized.
        width: bytes per weight with this precision, including scales.
        unquantized: fraction of each part's weights that stays in 16 bits. Parts not listed are quantized completely.
        quantized: whether config.json states that the checkpoint is quantized.
        block: number of neighbouring weights with a common scale, or 1 if all weights of a row share a scale.
        expert_width: bytes per weight of the experts if their precision differs, or None.
    """

    dtype: Precision
    width: float
    unquantized: Mapping[Part, float] = field(default_factory=dict)
    quantized: bool = True
    block: int = 1
    expert_width: float | None = None

    def stored(self, weights: Weights) -> float:
        """Return the size in bytes of a checkpoint whose parts have this many weights."""
        unquantized = self.unquantized_weights(weights)
        experts = weights["experts"] * (1 - self.unquantized.get("experts", 0.0))
        narrower = 0.0 if self.expert_width is None else experts * (self.width - self.expert_width)
        return 2 * unquantized + self.width * (sum(weights.values()) - unquantized) - narrower

    def unquantized_weights(self, weights: Weights) -> float:
        """Return the number of weights that stay in 16 bits."""
        return sum(number * self.unquantized.get(name, 0.0) for name, number in weights.items())


def quantization(config: Config) -> Quantization:
    """Return a checkpoint's quantization from `quantization_config` or `compression_config` in its config.json."""
    says = config.part("quantization_config") or config.part("compression_config")
    if not says:
        name = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch.")
        dtype = _CHECKPOINT.get(name, "bf16")
        return Quantization(dtype, WIDTH[dtype], quantized=False)
    groups = part(says, "config_groups")  # compressed-tensors
    weights = part(part(groups, next(iter(groups), "")), "weights")
    dtype = _dtype(says, weights)
    symmetric = True in (weights.get("symmetric"), says.get("sym")) or says.get("zero_point") is False
    group = weights.get("group_size") or says.get("group_size")
    size = whole_number("group_size", group if isinstance(group, int) and group > 0 else None)
    return Quantization(
        dtype,
        _width(dtype, size, symmetric),
        _unquantized(config, says),
        block=_block(says, weights, size),
        expert_width=WIDTH["mxfp4"] if _has_fp4_experts(config) else None,
    )


def _has_fp4_experts(config: Config) -> bool:
    """Return whether the experts of an FP8 checkpoint have 4 bits per weight (DeepSeek-V4)."""
    return "fp4" in (config.get("expert_dtype"), config.part("quantization_config").get("expert_dtype"))


def _block(says: Mapping[str, Any], weights: Mapping[str, Any], group: int) -> int:
    sizes = says.get("weight_block_size") or weights.get("block_structure")
    widths = [whole_number("weight_block_size", item) for item in sizes] if isinstance(sizes, list) else []
    if "mxfp4" in str(says.get("quant_method")):  # engines pad gpt-oss's experts
        return 1
    return max(widths, default=0) or group or 1


def _dtype(says: Mapping[str, Any], weights: Mapping[str, Any]) -> Precision:
    algorithms = {
        str(part(says["quantized_layers"], name).get("quant_algo")) for name in part(says, "quantized_layers")
    }
    method_names = (says.get("quant_method"), says.get("quant_algo"), says.get("format"), *sorted(algorithms))
    method = " ".join(map(str, method_names)).lower()
    bits = weights.get("num_bits") or says.get("bits") or says.get("w_bit")
    floating = weights.get("type") == "float" or "fp" in method
    if "mxfp4" in method:
        return "mxfp4"
    if bits == 4 or says.get("load_in_4bit") or any(word in method for word in ("fp4", "w4", "int4")):
        return "fp4" if floating else "int4"
    return "fp8" if floating else "int8"


def _width(dtype: Precision, group: int, symmetric: bool) -> float:
    """Return the bytes per weight, including the scale and zero point of each group.

    int4 has a 16-bit scale, and a 4-bit zero point if it is not symmetric; fp4 (NVFP4) has an 8-bit scale.
    """
    if dtype == "int4" and group:
        return 0.5 + (2 if symmetric else 2.5) / group
    if dtype == "fp4" and group:
        return 0.5 + 1 / group
    return WIDTH[dtype]


def _unquantized(config: Config, says: Mapping[str, Any]) -> Mapping[Part, float]:
    """Return the fraction of each part that stays in 16 bits, according to the lists of excluded modules."""
    fractions: dict[Part, float] = dict.fromkeys(_NEVER_QUANTIZED, 1.0)
    of_layers: dict[Part, set[int]] = {}
    for words in _excluded(says):
        name = next((name for word, name in _WORDS if word in words), None)
        if name is None:
            continue
        if (layer := _NUMBERED_LAYER.search(words)) is None:
            fractions[name] = 1.0
        else:
            of_layers.setdefault(name, set()).add(int(layer[1]))
    for name, numbers in of_layers.items():
        fractions[name] = max(fractions.get(name, 0.0), min(1.0, len(numbers) / config.layers()))
    if str(says.get("quant_method")) == "mxfp4":  # gpt-oss quantizes only its experts
        fractions |= {"attention": 1.0}
    return fractions


def _excluded(says: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the modules that are not quantized, each with a dot at the end."""
    for name in ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers"):
        listed = says.get(name)
        for module in listed if isinstance(listed, list) else ():
            yield str(module)[:500].replace("\\", "") + "."


# -- headers of safetensors files: 8 bytes with the length, then names, types and shapes as JSON -----------------------


_LARGEST_HEADER = 25_000_000
"""Maximum length of a header in bytes, the same as in huggingface_hub. The format allows 100 MB."""

_FIRST = 128 << 10
"""Number of bytes to read first. Most headers are shorter."""

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
"""Pattern for the names of tensors that describe how other tensors are quantized, and are not counted as weights."""

_PACKED = ("qweight", "weight_packed", "_blocks")
"""Suffixes of the names of tensors that pack several weights into each element."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.([0-9]{1,5})\.")


@dataclass(frozen=True)
class Contents:
    """The contents of safetensors files according to their headers.

    Attributes:
        parameters: number of weights. Packed weights are counted individually.
        stored: size of all tensors in bytes.
        layers: highest layer index plus one, or 0 if the names of the tensors contain no layer index.
    """

    parameters: float
    stored: int
    layers: int


def contents(files: Files, names: Iterable[str], bits: int | None = None, *, fp4_experts: bool = False) -> Contents:
    """Read the headers of safetensors files.

    Args:
        names: names of the files to read.
        bits: number of bits of a packed weight, by default 4.
        fp4_experts: whether each byte of the experts contains two weights.

    Raises:
        SpecError: a header is invalid, or there are too many files.
    """
    file_names = list(names)
    if len(file_names) > _MOST_FILES:
        raise SpecError(f"there are {len(file_names)} safetensors files, but at most {_MOST_FILES} are supported")
    with ThreadPoolExecutor(_THREADS) as threads:
        read = list(threads.map(lambda name: _tensors(files, name, _Bits(bits or 4, fp4_experts)), file_names))
    return Contents(
        sum(item.parameters for item in read), sum(item.stored for item in read), max(item.layers for item in read)
    )


class _Bits(NamedTuple):
    """The number of bits of a packed weight, and whether experts have two weights in each byte."""

    packed: int
    fp4_experts: bool


def _tensors(files: Files, name: str, bits: _Bits) -> Contents:
    header, length = _header(files, name, files.sizes[name])
    room = files.sizes[name] - 8 - length
    tensors = [_tensor(name, tensor, fields, room, bits) for tensor, fields in header.items()]
    return Contents(
        sum((item.parameters for item in tensors), 0.0),
        max((item.stored for item in tensors), default=0),
        max((item.layers for item in tensors), default=0),
    )


def _tensor(name: str, tensor: str, fields: object, room: int, bits: _Bits) -> Contents:
    """Return the `Contents` of one tensor. Its `stored` is the offset at which the tensor ends, not a size."""
    if tensor == "__metadata__":
        return Contents(0.0, 0, 0)
    if not isinstance(fields, Mapping):
        raise SpecError(f"{name}: the header's entry {tensor[:100]!r} is not an object")
    number, end = _numbers(name, tensor, fields, room)
    # Encoders of media and draft layers for multi-token prediction have their own layer numbers.
    layer = None if re.search(r"vis|audio|mtp|draft", tensor) else _LAYER.search(tensor)
    weights = _weights(tensor, str(fields.get("dtype")), number, bits)
    return Contents(weights, end, 0 if layer is None else int(layer[1]) + 1)


def _header(files: Files, name: str, size: int) -> tuple[Mapping[str, Any], int]:
    """Return the content of a header, and its length in bytes."""
    start = files.read(name, 0, _FIRST)
    length = struct.unpack_from("<Q", start)[0] if len(start) >= 8 else -1
    if not 2 <= length <= size - 8:
        problem = "has no header" if length < 0 else f"says that its header has {length} bytes"
        raise SpecError(f"{name} {problem}, but the file has {size} bytes")
    if length > _LARGEST_HEADER:
        raise SpecError(f"{name}: the header has {length} bytes, but at most {_LARGEST_HEADER} bytes are supported")
    content = start[8 : 8 + length]
    if len(content) < length:
        content += files.read(name, len(start), length - len(content))
    try:
        header = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{name}: the header is not valid JSON: {type(error).__name__}") from None
    if not isinstance(header, dict):
        raise SpecError(f"{name}: the header is not a JSON object")
    return header, length


def _numbers(name: str, tensor: str, fields: Mapping[str, Any], room: int) -> tuple[int, int]:
    """Return the number of elements in a tensor, and the offset at which it ends.

    Args:
        room: number of bytes after the header.

    Raises:
        SpecError: the shape or the offsets are invalid, or do not match.
    """
    shape, offsets, bits = fields.get("shape"), fields.get("data_offsets"), _BITS.get(str(fields.get("dtype")))
    if (
        not (isinstance(shape, list) and isinstance(offsets, list) and len(shape) <= 8 and len(offsets) == 2)
        or not all(isinstance(item, int) and 0 <= item < 1 << 48 for item in (*shape, *offsets))
        or not offsets[0] <= offsets[1] <= room
    ):
        raise SpecError(f"{name}: the tensor {tensor[:100]!r} has no valid shape, or is outside of the file")
    number = math.prod(shape)
    if bits is not None and (number * bits + 7) // 8 != offsets[1] - offsets[0]:
        raise SpecError(f"{name}: tensor {tensor[:100]!r} has {number} elements, but {offsets[1] - offsets[0]} bytes")
    return number, offsets[1]


def _weights(tensor: str, dtype: str, number: int, bits: _Bits) -> float:
    """Return the number of weights in a tensor: 0 for scales, and several per element for packed weights."""
    if _BESIDE.search(tensor):
        return 0.0
    if bits.fp4_experts and dtype in ("I8", "U8") and ".experts." in tensor:
        return number * 2.0
    width = _BITS.get(dtype, bits.packed)
    packed = tensor.endswith(_PACKED) or (dtype == "U8" and tensor.endswith("weight"))
    return number * (width / bits.packed) if packed and dtype in ("U8", "I8", "I32", "U32", "I64") else float(number)
