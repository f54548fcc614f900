"""GGUF files of two small layers with random weights, in any kind of quantization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

HIDDEN, HEADS, SHARED, FEED, LAYERS = 256, 4, 2, 512, 2
LETTERS = [chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 512)]][:256]
"""The tokens of all bytes, as byte-level BPE writes them."""


def quantized(kind: Kind, shape: tuple[int, int], random: np.random.Generator) -> Any:
    """Random weights of about 0.02 in the bytes of `kind`."""
    if kind in (Kind.Q4_K, Kind.Q6_K):  # no quantizer in the package: whole numbers at random, sane scales
        block, size = gguf.GGML_QUANT_SIZES[kind]
        data = random.integers(0, 256, (shape[0], shape[1] // block, size), np.uint8)
        scales = slice(0, 4) if kind is Kind.Q4_K else slice(-2, None)
        data[..., scales] = np.frombuffer(np.full(2, 1e-4, np.float16).tobytes(), np.uint8)[
            : data[..., scales].shape[-1]
        ]
        return data.reshape(shape[0], -1)
    values = random.normal(0.003, 0.02, shape).astype(np.float32)
    return values.astype(np.float16) if kind is Kind.F16 else gguf.quants.quantize(values, kind)


def write_small(
    path: Path,
    kind: Kind,
    architecture: str = "llama",
    more: dict[str, Any] | None = None,
    keys: dict[str, Any] | None = None,
    spread: float = 0.1,
    context: int = 128,
    first: dict[str, Any] | None = None,
) -> None:
    """A GGUF file that OpenVINO GenAI reads, its matrices quantized as `kind`, with norms of 1 ± `spread`.

    Args:
        keys: values after all others.
        first: values before the vocabulary.
    """
    random, writer = np.random.default_rng(7), gguf.GGUFWriter(path, architecture)
    writer.add_context_length(context)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(SHARED)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_file_type({Kind.F16: 1, Kind.Q4_0: 2, Kind.Q4_1: 3, Kind.Q8_0: 7}.get(kind, 15))
    for name, value in (first or {}).items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*LETTERS, "<eos>", "ab"])
    writer.add_token_types([1] * 256 + [3, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)
    shapes = {"token_embd": (258, HIDDEN), "output": (258, HIDDEN)}
    for layer in range(LAYERS):
        both = {"attn_q": HIDDEN, "attn_k": HIDDEN // 2, "attn_v": HIDDEN // 2, "attn_output": HIDDEN}
        shapes |= {f"blk.{layer}.{name}": (rows, HIDDEN) for name, rows in both.items()}
        shapes |= {f"blk.{layer}.ffn_gate": (FEED, HIDDEN), f"blk.{layer}.ffn_up": (FEED, HIDDEN)}
        shapes[f"blk.{layer}.ffn_down"] = (HIDDEN, FEED)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", quantized(kind, shape, random), raw_dtype=kind)
    vectors = [f"blk.{layer}.{name}" for layer in range(LAYERS) for name in ("attn_norm", "ffn_norm")]
    for name in [*vectors, "output_norm"]:
        writer.add_tensor(f"{name}.weight", random.normal(1, spread, HIDDEN).astype(np.float32))
    for name, value in (more or {}).items():
        writer.add_tensor(name, value)
    for name, value in (keys or {}).items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
