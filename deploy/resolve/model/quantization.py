"""The precision of a checkpoint, and its bytes: which parts are quantized, and how wide a weight is with its scales."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deploy.resolve.model.config import Config, part, whole_number
from deploy.resolve.model.weights import Part, Weights
from deploy.spec.values import Precision

WIDTH: Mapping[str, float] = {
    "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "mxfp4": 0.53125, "fp4": 0.5625, "int4": 0.5625,
}  # fmt: skip
"""Bytes of one weight, scales included (mxfp4: an 8-bit scale for every 32, fp4 as in NVFP4: for every 16)."""

_CHECKPOINT: Mapping[str, Precision] = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8",
}

_ALWAYS_KEPT: tuple[Part, ...] = ("embeddings", "head", "router", "media")

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
"""Parts by words in the names of modules, the first that is found."""

_LAYER = re.compile(r"layers[.](\d{1,4})[.]")


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint is quantized.

    Attributes:
        dtype: precision of the quantized weights, or of all.
        width: bytes of a quantized weight, with its scales.
        kept: the fraction of each part that stays in 16 bits.
        quantized: whether config.json says that weights are.
    """

    dtype: Precision
    width: float
    kept: Mapping[Part, float] = field(default_factory=dict)
    quantized: bool = True

    def stored(self, weights: Weights) -> float:
        """Return the bytes of a checkpoint with so many weights."""
        kept = self.kept_weights(weights)
        return 2 * kept + self.width * (sum(weights.values()) - kept)

    def kept_weights(self, weights: Weights) -> float:
        """Return how many of the weights stay in 16 bits."""
        return sum(number * self.kept.get(name, 0.0) for name, number in weights.items())


def quantization(config: Config) -> Quantization:
    """Read how a checkpoint is quantized from its `quantization_config`, or from ModelOpt's `quantization`."""
    says = config.part("quantization_config") or config.part("compression_config")
    if not says:
        name = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch.")
        dtype = _CHECKPOINT.get(name, "bf16")
        return Quantization(dtype, WIDTH[dtype], quantized=False)
    groups = part(says, "config_groups")  # compressed-tensors
    weights = part(part(groups, next(iter(groups), "")), "weights")
    dtype = _dtype(says, weights)
    group = weights.get("group_size") or says.get("group_size")
    symmetric = True in (weights.get("symmetric"), says.get("sym")) or says.get("zero_point") is False
    width = _width(
        dtype, whole_number("group_size", group if isinstance(group, int) and group > 0 else None), symmetric
    )
    return Quantization(dtype, width, _kept(config, says))


def _dtype(says: Mapping[str, Any], weights: Mapping[str, Any]) -> Precision:
    algorithms = {
        str(part(says["quantized_layers"], name).get("quant_algo")) for name in part(says, "quantized_layers")
    }
    named = (says.get("quant_method"), says.get("quant_algo"), says.get("format"), *sorted(algorithms))
    method = " ".join(map(str, named)).lower()
    bits = weights.get("num_bits") or says.get("bits") or says.get("w_bit")
    floating = weights.get("type") == "float" or "fp" in method
    if "mxfp4" in method:
        return "mxfp4"
    if bits == 4 or says.get("load_in_4bit") or any(word in method for word in ("fp4", "w4", "int4")):
        return "fp4" if floating else "int4"
    return "fp8" if floating else "int8"


def _width(dtype: Precision, group: int, symmetric: bool) -> float:
    """Return the bytes of a weight, with a scale for every group: of 16 bits, and a zero point of 4; NVFP4's of 8."""
    if dtype == "int4" and group:
        return 0.5 + (2 if symmetric else 2.5) / group
    if dtype == "fp4" and group:
        return 0.5 + 1 / group
    return WIDTH[dtype]


def _kept(config: Config, says: Mapping[str, Any]) -> Mapping[Part, float]:
    """Return the fraction of each part that stays in 16 bits, by the lists of modules that are left out."""
    kept: dict[Part, float] = dict.fromkeys(_ALWAYS_KEPT, 1.0)
    of_layers: dict[Part, set[int]] = {}
    for name in ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers"):
        listed = says.get(name)
        for module in listed if isinstance(listed, list) else ():
            words = str(module)[:500].replace("\\", "") + "."
            named = next((named for word, named in _WORDS if word in words), None)
            if named is None:
                continue
            if (layer := _LAYER.search(words)) is None:
                kept[named] = 1.0
            else:
                of_layers.setdefault(named, set()).add(int(layer[1]))
    for named, numbers in of_layers.items():
        kept[named] = max(kept.get(named, 0.0), min(1.0, len(numbers) / config.layers()))
    if str(says.get("quant_method")) == "mxfp4":  # of gpt-oss only the experts
        kept |= {"attention": 1.0}
    return kept
