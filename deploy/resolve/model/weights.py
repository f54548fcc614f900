"""Count a model's weights by its config.json, by part: a quantized checkpoint keeps some parts in 16 bits.

Norms and biases are left out: less than a thousandth. Where the safetensors headers can be read they count instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from deploy.resolve.model.config import Config, whole_number
from deploy.resolve.model.layers import (
    Kind,
    full_attention,
    head_size,
    hidden_size,
    kinds,
    kv_heads,
    linear,
    mamba,
    mamba_groups,
    num_heads,
    windowed_attention,
)

Part = Literal["embeddings", "head", "attention", "dense", "experts", "shared", "router", "media"]
Weights = Mapping[Part, float]
"""Numbers of weights. `shared`: experts that each token passes; `media`: the encoders of images and audio."""

_TWO_MATRICES = (
    "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2", "mpt", "nemotron",
    "nemotron_h",
)  # fmt: skip
"""Types whose feed-forward networks have no gate."""

_GATED_QUERIES = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
"""Types whose queries are projected together with a gate of their size."""

_OWN_ENDS = ("deepseek_v3", "deepseek_v32", "glm4_moe")
"""Types whose layer that predicts further tokens is stored with embeddings and a last layer of its own."""

_ALONE = {"-", "E", "mlp", "moe"}
"""Words for layers that are a feed-forward network alone."""

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def count(config: Config) -> Weights:
    """Count the weights of each part, with those of layers that predict further tokens.

    Raises:
        SpecError: config.json lacks something, or a number in it cannot be.
    """
    found = Counter[Part]()
    hidden, vocabulary = hidden_size(config), config.number("vocab_size", "padded_vocab_size")
    found["embeddings"] = vocabulary * hidden + _per_layer_embeddings(config, hidden)
    found["head"] = 0 if config.flag("tie_word_embeddings") else vocabulary * hidden
    of_layers = kinds(config)
    shared_from = len(of_layers) - config.number("num_kv_shared_layers", default=0)
    for number, kind in enumerate(of_layers):
        found["attention"] += _mixer(config, kind, hidden)
        _feed_forward(config, number, kind, hidden, found, wide=number >= shared_from)
    for _ in range(min(config.number("num_nextn_predict_layers", default=0), 8)):  # MTP
        found["attention"] += _mixer(config, Kind.FULL, hidden) + 2 * hidden * hidden
        _feed_forward(config, len(of_layers) - 1, Kind.FULL, hidden, found)
        found["embeddings"] += 2 * vocabulary * hidden if config.type in _OWN_ENDS else 0
    found["media"] += sum(_encoder(config.part(name), hidden) for name in ("vision_config", "audio_config"))
    return found


def _per_layer_embeddings(config: Config, hidden: int) -> int:
    """Return Gemma's embeddings for each layer, and what brings them into the layer."""
    size = config.number("hidden_size_per_layer_input", default=0)
    if not size:
        return 0
    vocabulary = config.number("vocab_size_per_layer_input", default=config.number("vocab_size"))
    return config.layers() * size * (vocabulary + 3 * hidden)


def _mixer(config: Config, kind: Kind, hidden: int) -> int:
    """Return the weights of a layer's attention, or of what it has in its place."""
    if kind is Kind.MAMBA:
        heads, size = mamba(config)
        width = config.number("ssm_state_size", "mamba_d_state", "state_size", default=128)
        return hidden * (3 * heads * size + 2 * mamba_groups(config) * width + heads)
    if kind is Kind.LINEAR:
        keys, of_key, values, of_value = linear(config)
        return hidden * (2 * keys * of_key + 3 * values * of_value + 2 * values)
    if kind is Kind.CONVOLUTION:
        return 4 * hidden * hidden
    if kind is Kind.NONE:
        return 0
    return _latent(config, hidden) if "kv_lora_rank" in config else _grouped(config, kind, hidden)


def _grouped(config: Config, kind: Kind, hidden: int) -> int:
    size, heads = head_size(config), kv_heads(config)
    if kind is Kind.WINDOW:
        heads = windowed_attention(config)[0]
        size = config.number("swa_head_dim", default=size)
    elif "global_head_dim" in config:
        heads = full_attention(config)[0]
        size = config.number("global_head_dim")
    of_values = whole_number("v_head_dim", config.get("v_head_dim")) or size
    values = 0 if kind is Kind.FULL and config.flag("attention_k_eq_v") else heads * of_values
    queries = num_heads(config) * size * (2 if config.type in _GATED_QUERIES else 1)
    return hidden * (queries + heads * size + values + num_heads(config) * of_values)


def _latent(config: Config, hidden: int) -> int:
    """Return the weights of latent attention, and of its indexer."""
    heads, rope = num_heads(config), config.number("qk_rope_head_dim")
    key, value = config.number("qk_nope_head_dim", default=128), config.number("v_head_dim", default=128)
    compressed, queries = config.number("kv_lora_rank"), config.number("q_lora_rank", default=0)
    found = hidden * (compressed + rope) + compressed * heads * (key + value) + heads * value * hidden
    found += queries * (hidden + heads * (key + rope)) if queries else hidden * heads * (key + rope)
    if "index_n_heads" in config:
        index_heads, index = config.number("index_n_heads"), config.number("index_head_dim")
        found += queries * index_heads * index + hidden * (index + index_heads)
    return found


def _feed_forward(
    config: Config, number: int, kind: Kind, hidden: int, found: Counter[Part], *, wide: bool = False
) -> None:
    """Add the weights of a layer's feed-forward network."""
    matrices = hidden * (2 if config.type in _TWO_MATRICES else 3)
    dense = config.number("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden)
    words = config.words()
    if not _ALONE.isdisjoint(words):  # a layer is one thing only
        if words[number : number + 1] in (("-",), ("mlp",)):
            found["dense"] += matrices * dense
        if words[number : number + 1] not in (("E",), ("moe",)):
            return
    experts = config.number(*_EXPERTS, default=0)
    if not experts or _is_dense(config, number):
        dense = config.number("intermediate_size_mlp", default=dense)  # Llama 4: the layers without experts
        found["dense"] += matrices * dense * (2 if wide and config.flag("use_double_wide_mlp") else 1)
        return
    of_expert = config.number("moe_intermediate_size", "expert_ffn_hidden_size", default=dense)
    size = config.number("moe_latent_size", "routed_expert_hidden_size", default=hidden)  # experts may work in less
    found["experts"] += matrices // hidden * size * of_expert * experts
    found["router"] += hidden * experts
    found["shared"] += matrices * _shared(config, of_expert, dense) + (2 * hidden * size if size != hidden else 0)
    if config.flag("enable_moe_block"):  # Gemma 4: beside the experts
        found["dense"] += matrices * dense


def _shared(config: Config, of_expert: int, dense: int) -> int:
    """Return the width of the experts that each token passes."""
    if config.type.startswith("llama4"):
        return dense
    names = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
    return config.number(*names, default=of_expert * config.number("n_shared_experts", "num_shared_experts", default=0))


def _is_dense(config: Config, number: int) -> bool:
    """Whether a layer of a mixture of experts has none."""
    if number < config.number("first_k_dense_replace", default=0):
        return True
    if kinds := config.list("mlp_layer_types"):
        return number < len(kinds) and kinds[number] == "dense"
    if frequencies := config.list("moe_layer_freq"):
        return number < len(frequencies) and frequencies[number] == 0
    if number in config.list("mlp_only_layers"):
        return True
    step = config.number("interleave_moe_layer_step", "decoder_sparse_step", default=1)
    return (number + 1) % step != 0


def _encoder(part: Mapping[str, Any], hidden: int) -> int:
    """Estimate an encoder of images or audio, with its projection into the model."""
    of_encoder = Config(part)
    if "hidden_size" not in of_encoder:
        return 0
    width = of_encoder.number("hidden_size")
    layers = of_encoder.number("num_hidden_layers", "depth", default=0, largest=4096)
    wide = of_encoder.number("intermediate_size", "mlp_dim", default=4 * width)
    matrices = 3 if of_encoder.type in ("pixtral", "gemma4_vision", "qwen2_5_vl") else 2
    return layers * (4 * width * width + matrices * width * wide) + 4 * width * hidden
