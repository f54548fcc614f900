"""Checks a LoRA adapter's weights before vLLM loads them, which accepts any."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

_RANK_AXIS = {"lora_A.weight": 0, "lora_B.weight": 1}


def check_weights(directory: Path) -> None:
    """Check that the weights are finite, and of the rank in adapter_config.json.

    Measured with vLLM 0.32: weights that are not finite spoil the answers of all later requests, with and without
    adapters.

    Raises:
        ValueError: names the tensor.
    """
    config = json.loads((directory / "adapter_config.json").read_text())
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if alpha is not None and not (isinstance(alpha, int | float) and math.isfinite(alpha)):
        raise ValueError(f"adapter_config.json: lora_alpha={alpha} is not a number")
    for name, tensor in _tensors(directory):
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"the weights {name} are not all numbers")
        for end, axis in _RANK_AXIS.items():
            if name.endswith(end) and (tensor.ndim != 2 or tensor.shape[axis] != rank):
                raise ValueError(f"the weights {name} of shape {list(tensor.shape)} are not of rank {rank}")


def _tensors(directory: Path) -> list[tuple[str, Any]]:
    safe = directory / "adapter_model.safetensors"
    if safe.is_file():
        from safetensors.torch import load_file

        return list(load_file(safe).items())
    import torch

    return list(torch.load(directory / "adapter_model.bin", map_location="cpu", weights_only=True).items())
