"""GGUF files of random LoRA adapters for the small models."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests.checkpoints.small_gguf import HIDDEN, LAYERS

_RANK = 4


def write_lora(path: Path, seed: int, architecture: str = "llama", size: int = HIDDEN) -> Path:
    """Write an adapter that changes nearly every token of a response.

    Args:
        size: number of inputs and outputs of the matrices that it changes.
    """
    random, writer = np.random.default_rng(seed), gguf.GGUFWriter(path, architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(_RANK))
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_output"):
            shapes = {"lora_a": (_RANK, size), "lora_b": (size, _RANK)}
            for part, shape in shapes.items():
                values = random.normal(0, 0.3, shape).astype(np.float32)
                writer.add_tensor(f"blk.{layer}.{name}.weight.{part}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
