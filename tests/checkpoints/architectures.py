"""GGUF files of small random models of architectures that OpenVINO GenAI refuses, beside their tokenizer's directory.

Greedy ids must not depend on the last bits of the logits. The weights of the last matrix give the logits a standard
deviation of 0.5, so that the first two of five hundred differ by 0.15 on average. Tests leave out the few prompts whose
response nevertheless comes to a tie. Larger logits would differ by more than 1e-4 between two batches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from tests.doubles import tiny

SIZE, HEADS, SHARED, HEAD, FEED, LAYERS = 128, 4, 2, 32, 192, 2
LOGITS = 0.5
"""Standard deviation of the logits."""
_ENDS = 1.4  # the end tokens' logits are larger by this factor, so that some responses end
_INNER, _STATES, _RANK, _KERNEL = 2 * SIZE, 16, 8, 4
"""Sizes of Mamba's inner vectors, states, time steps and convolution."""

Shape = tuple[int, ...]


class Architecture(NamedTuple):
    """What distinguishes an architecture.

    Attributes:
        matrices: shapes of a layer's matrices, by name.
        norms: sizes of a layer's norms, by name.
        shifted: whether its norms have biases and are of LayerNorm's kind.
        keys: values of further keys, such as `attention.sliding_window`.
        other: writes further tensors.
    """

    matrices: Mapping[str, Shape]
    norms: Mapping[str, int]
    shifted: bool = False
    keys: Mapping[str, Any] = {}
    other: Callable[[Weights], None] = lambda weights: None


class Weights:
    """Random tensors of a file."""

    def __init__(self, writer: gguf.GGUFWriter) -> None:
        self._writer = writer
        self._random = np.random.default_rng(11)

    def matrix(self, name: str, shape: Shape, scale: float = 1.0) -> None:
        """Add a matrix whose products with vectors of unit variance have the standard deviation `scale`."""
        values = self._random.normal(0, scale / shape[-1] ** 0.5, shape)
        self.add(f"{name}.weight", values)

    def norm(self, name: str, size: int, *, shifted: bool) -> None:
        self.add(f"{name}.weight", self._random.normal(1, 0.1, size))
        if shifted:
            self.bias(name, size)

    def bias(self, name: str, size: int) -> None:
        self.add(f"{name}.bias", self._random.normal(0, 0.1, size))

    def positive(self, shape: Shape) -> np.ndarray[Any, Any]:
        return self._random.uniform(0.5, 2.0, shape)

    def add(self, name: str, values: np.ndarray[Any, Any]) -> None:
        self._writer.add_tensor(name, values.astype(np.float32))


def _positions_and_biases(weights: Weights) -> None:
    weights.matrix("position_embd", (tiny.CONTEXT, SIZE), SIZE**0.5 / 2)
    for layer in range(LAYERS):
        sizes = {"attn_qkv": _FUSED, "attn_output": SIZE, "ffn_up": FEED, "ffn_down": SIZE}
        for name, size in sizes.items():
            weights.bias(f"blk.{layer}.{name}", size)


def _states(weights: Weights) -> None:
    for layer in range(LAYERS):
        name = f"blk.{layer}.ssm_"
        weights.matrix(f"{name}conv1d", (_INNER, _KERNEL))
        weights.bias(f"{name}conv1d", _INNER)
        weights.bias(f"{name}dt", _INNER)
        weights.add(f"{name}a", -weights.positive((_INNER, _STATES)))
        weights.add(f"{name}d", weights.positive((_INNER,)))


_OTHER = HEAD * SHARED
_FUSED = SIZE + 2 * _OTHER
_APART = {
    "attn_q": (SIZE, SIZE),
    "attn_k": (_OTHER, SIZE),
    "attn_v": (_OTHER, SIZE),
    "attn_output": (SIZE, SIZE),
}
_TOGETHER = {"attn_qkv": (_FUSED, SIZE), "attn_output": (SIZE, SIZE)}
_PLAIN_FEED = {"ffn_up": (FEED, SIZE), "ffn_down": (SIZE, FEED)}
_GATED_FEED = {"ffn_gate": (FEED, SIZE), **_PLAIN_FEED}
_HEADS = {"attn_q_norm": HEAD, "attn_k_norm": HEAD}
_BEFORE, _AFTER = {"attn_norm": SIZE, "ffn_norm": SIZE}, {"post_attention_norm": SIZE, "post_ffw_norm": SIZE}

ARCHITECTURES = {
    "gpt2": Architecture(_TOGETHER | _PLAIN_FEED, _BEFORE, shifted=True, other=_positions_and_biases),
    "gemma3": Architecture(
        _APART | _GATED_FEED, _BEFORE | _AFTER | _HEADS, keys={"attention.sliding_window": 8}
    ),
    "phi3": Architecture(_TOGETHER | {"ffn_up": (2 * FEED, SIZE), "ffn_down": (SIZE, FEED)}, _BEFORE),
    "olmo2": Architecture(_APART | _GATED_FEED, _AFTER | {"attn_q_norm": SIZE, "attn_k_norm": _OTHER}),
    "falcon": Architecture(
        _TOGETHER | _PLAIN_FEED, {"attn_norm": SIZE, "attn_norm_2": SIZE}, shifted=True
    ),
    "stablelm": Architecture(_APART | _GATED_FEED, _BEFORE, shifted=True),
    "mamba": Architecture(
        {
            "ssm_in": (2 * _INNER, SIZE),
            "ssm_x": (_RANK + 2 * _STATES, _INNER),
            "ssm_dt": (_INNER, _RANK),
            "ssm_out": (SIZE, _INNER),
        },
        {"attn_norm": SIZE},
        keys={
            "ssm.conv_kernel": _KERNEL,
            "ssm.inner_size": _INNER,
            "ssm.state_size": _STATES,
            "ssm.time_step_rank": _RANK,
        },
        other=_states,
    ),
}  # fmt: skip


def make(directory: Path, architecture: str) -> Path:
    """Write the directory of the tokenizer, with the GGUF beside it as `model.gguf`."""
    tiny.make(directory)
    model = ARCHITECTURES[architecture]
    writer = gguf.GGUFWriter(directory / "model.gguf", architecture)
    _write_keys(writer, architecture, model)
    num_tokens = _write_tokenizer(writer, directory)
    weights = Weights(writer)
    weights.matrix("token_embd", (num_tokens, SIZE), SIZE**0.5)
    _write_output(weights, num_tokens, shifted=model.shifted)
    for layer in range(LAYERS):
        for name, shape in model.matrices.items():
            weights.matrix(f"blk.{layer}.{name}", shape)
        for name, size in model.norms.items():
            weights.norm(f"blk.{layer}.{name}", size, shifted=model.shifted)
    model.other(weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return directory


def _write_keys(writer: gguf.GGUFWriter, architecture: str, model: Architecture) -> None:
    writer.add_context_length(tiny.CONTEXT)
    writer.add_embedding_length(SIZE)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(SHARED)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_layer_norm_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_file_type(0)
    for name, value in model.keys.items():
        writer.add_uint32(f"{architecture}.{name}", value)


def _write_tokenizer(writer: gguf.GGUFWriter, directory: Path) -> int:
    """Write the tokenizer of `tiny`'s directory. Return the number of its tokens."""
    file = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = sorted(file["model"]["vocab"], key=file["model"]["vocab"].get)
    special = {token["content"] for token in file["added_tokens"]}
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([control if token in special else normal for token in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in file["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(tiny.EOS[0])
    writer.add_eot_token_id(tiny.EOS[1])
    writer.add_add_bos_token(False)
    writer.add_chat_template(json.loads((directory / "tokenizer_config.json").read_text())["chat_template"])
    return len(vocabulary)


def _write_output(weights: Weights, num_tokens: int, *, shifted: bool) -> None:
    weights.norm("output_norm", SIZE, shifted=shifted)
    rows = np.random.default_rng(12).normal(0, LOGITS / SIZE**0.5, (num_tokens, SIZE))
    rows[list(tiny.EOS)] *= _ENDS
    weights.add("output.weight", rows)
