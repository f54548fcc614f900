"""Options of OpenVINO's engine alone."""

from __future__ import annotations

from handler.config.options.option import Option, one_of

_OPENVINO = ("openvino",)

GROUP_SIZES = (32, 64, 128)
"""Weights of a row that share a scale and a zero point."""


def _group_size(text: str) -> int:
    return int(one_of(*map(str, GROUP_SIZES))(text))


OPENVINO = (
    Option("option.quantize", "quantization", one_of("int8", "int4"), None, "bits of a checkpoint's weights after conversion: int8 or int4 (own-model.md)", ("option.quantization",), engines=_OPENVINO),
    Option("option.group_size", "group_size", _group_size, None, "weights that share a scale with option.quantize=int4: 32 (default), 64 or 128, or fewer where that does not divide a matrix's rows", engines=_OPENVINO),
)  # fmt: skip
