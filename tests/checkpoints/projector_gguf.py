"""A GGUF of a random projector (mmproj) for images, as LLaVA has it: one layer, and a token for each of 16 patches."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests.checkpoints.small_gguf import HIDDEN

SIDE, PATCH, WIDTH, FEED = 32, 8, 64, 128
NUM_TOKENS = (SIDE // PATCH) ** 2
"""Tokens of an image."""


def write_projector(path: Path) -> None:
    random, writer = np.random.default_rng(11), gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.use_gelu", True)
    numbers = {
        "image_size": SIDE, "patch_size": PATCH, "embedding_length": WIDTH, "feed_forward_length": FEED,
        "block_count": 2, "attention.head_count": 4, "projection_dim": HIDDEN,
    }  # fmt: skip
    for name, value in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    writer.add_file_type(0)
    shapes: dict[str, tuple[int, ...]] = {
        "v.class_embd": (WIDTH,),
        "v.patch_embd.weight": (WIDTH, 3, PATCH, PATCH),
        "v.position_embd.weight": (NUM_TOKENS + 1, WIDTH),
        "mm.0.weight": (HIDDEN, WIDTH),
        "mm.0.bias": (HIDDEN,),
        "mm.2.weight": (HIDDEN, HIDDEN),
        "mm.2.bias": (HIDDEN,),
    }
    for layer in range(2):
        name = f"v.blk.{layer}"
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            shapes |= {f"{name}.{part}.weight": (WIDTH, WIDTH), f"{name}.{part}.bias": (WIDTH,)}
        shapes |= {f"{name}.ffn_up.weight": (FEED, WIDTH), f"{name}.ffn_up.bias": (FEED,)}
        shapes |= {f"{name}.ffn_down.weight": (WIDTH, FEED), f"{name}.ffn_down.bias": (WIDTH,)}
        shapes |= {f"{name}.{norm}.{part}": (WIDTH,) for norm in ("ln1", "ln2") for part in ("weight", "bias")}
    for name, shape in shapes.items():
        spread = 1.0 if name.startswith("mm.2") else 0.3
        writer.add_tensor(name, random.normal(0, spread, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
