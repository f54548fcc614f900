"""What the layers of a model keep for each request: K and V of all tokens, of a window, a state, or nothing."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from deploy.resolve.model.config import Config, whole_number


class Kind(enum.Enum):
    FULL = "full"
    """Attention over the whole context."""

    WINDOW = "window"
    """Attention over a sliding window, or over chunks of the context."""

    LINEAR = "linear"
    """Linear attention, with a state of fixed size (Gated DeltaNet, Kimi Delta Attention, lightning attention)."""

    MAMBA = "mamba"
    """A state space model, with a state of fixed size."""

    CONVOLUTION = "convolution"
    """A short convolution, with a state of a few values."""

    NONE = "none"
    """No attention: a layer of the feed-forward network alone."""


_NAMES = {
    "full_attention": Kind.FULL,
    "attention": Kind.FULL,
    "sliding_attention": Kind.WINDOW,
    "chunked_attention": Kind.WINDOW,
    "linear_attention": Kind.LINEAR,
    "mamba": Kind.MAMBA,
    "mamba2": Kind.MAMBA,
    "conv": Kind.CONVOLUTION,
    "moe": Kind.NONE,
    "mlp": Kind.NONE,
    "M": Kind.MAMBA,
    "*": Kind.FULL,
    "-": Kind.NONE,
    "E": Kind.NONE,
}
"""Layers by the words of `layer_types` and the letters of `hybrid_override_pattern`. Others count as FULL."""

_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "gemma4_text": 6, "cohere2": 4, "gpt_oss": 2}
"""Every how many layers one has full attention, where the model's class says it and not its config.json."""

_EVERY_LAYER = ("mistral", "mixtral", "phi3", "starcoder2")
"""Types whose `sliding_window` is that of all layers."""

_HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")


@dataclass(frozen=True)
class Cache:
    """What one request keeps.

    Attributes:
        kv_heads, head_dim: of the layers with full attention.
        window_layers: number of layers with a window; `window`: their tokens.
        uncached: layers without K and V.
        state: bytes of the states in all layers.
    """

    kv_heads: int
    head_dim: int
    window_layers: int = 0
    window: int | None = None
    window_kv_heads: int | None = None
    window_head_dim: int | None = None
    uncached: int = 0
    state: float = 0.0


def kinds(config: Config) -> list[Kind]:
    """Return each layer's kind. What is not understood counts as full attention, which needs most."""
    layers = config.layers()
    found = _listed(config) or _by_pattern(config, layers)
    return (found + [Kind.FULL] * layers)[:layers]


def _listed(config: Config) -> list[Kind]:
    """Read the kinds where config.json lists them."""
    if config.words():
        return [_NAMES.get(word, Kind.FULL) for word in config.words()]
    if config.list("hybrid_layer_pattern"):  # MiMo-V2
        return [Kind.WINDOW if item == 1 else Kind.FULL for item in config.list("hybrid_layer_pattern")]
    if config.list("attn_type_list"):  # MiniMax-Text-01
        return [Kind.FULL if item == 1 else Kind.LINEAR for item in config.list("attn_type_list")]
    full = config.part("linear_attn_config").get("full_attn_layers")  # Kimi Linear; counted from 1
    if isinstance(full, list):
        numbers = {item for item in full if isinstance(item, int)}
        return [Kind.FULL if number in numbers else Kind.LINEAR for number in range(1, config.layers() + 1)]
    return []


def _by_pattern(config: Config, layers: int) -> list[Kind]:
    """Derive the kinds from a period, or from the model's type."""
    other = Kind.WINDOW
    if config.type in _HYBRIDS:
        period, other = config.number("full_attention_interval", default=4), Kind.LINEAR
    elif config.type.startswith("llama4") and "attention_chunk_size" in config:
        rope = config.list("no_rope_layers")  # 1: with rotary embeddings, thus in chunks
        if rope:
            return [Kind.WINDOW if item else Kind.FULL for item in rope]
        period = config.number("no_rope_layer_interval", default=4)
    elif window(config) is None or config.get("use_sliding_window") is False:
        return []
    elif config.type in _EVERY_LAYER:
        return [Kind.WINDOW] * layers
    else:
        names = ("sliding_window_pattern", "_sliding_window_pattern")
        period = config.number(*names, default=_PATTERNS.get(config.type, 1))
    return [Kind.FULL if number % period == 0 else other for number in range(1, layers + 1)]


def window(config: Config) -> int | None:
    """Return the window's tokens; None: there is none."""
    return config.number("sliding_window", "sliding_window_size", "attention_chunk_size", default=0) or None


def cache(config: Config) -> Cache:
    """Compute what a request keeps.

    Raises:
        SpecError: config.json lacks something, or a number in it cannot be.
    """
    of_layers = kinds(config)
    heads, head_dim = full_attention(config)
    shared = min(config.number("num_kv_shared_layers", default=0), len(of_layers))  # Gemma: the last ones share
    own = of_layers[: len(of_layers) - shared]
    window_layers = own.count(Kind.WINDOW)
    window_heads, window_dim = windowed_attention(config)
    return Cache(
        kv_heads=heads,
        head_dim=head_dim,
        window_layers=window_layers,
        window=window(config) if window_layers else None,
        window_kv_heads=window_heads if window_layers and window_heads != heads else None,
        window_head_dim=window_dim if window_layers and window_dim != head_dim else None,
        uncached=len(of_layers) - sum(kind in (Kind.FULL, Kind.WINDOW) for kind in own),
        state=sum(_state(config, kind) for kind in own),
    )


def num_heads(config: Config) -> int:
    return config.number("num_attention_heads", "n_head", "n_heads")


def hidden_size(config: Config) -> int:
    return config.number("hidden_size", "n_embd", "d_model")


def full_attention(config: Config) -> tuple[int, int]:
    """Return KV heads and head size of a layer with full attention; K and V of different sizes: the mean."""
    if "kv_lora_rank" in config:  # latent attention: one vector for K and V together, on every GPU
        values = config.number("kv_lora_rank") + config.number("qk_rope_head_dim")
        if "index_head_dim" in config:  # sparse attention also keeps its indexer's keys, in 8 bits with a scale
            values += config.number("index_head_dim") + 4
        return 1, (values + 1) // 2
    heads = config.number("num_global_key_value_heads", default=0) or kv_heads(config)
    return heads, _mean(config.number("global_head_dim", default=0) or head_size(config), config.get("v_head_dim"))


def windowed_attention(config: Config) -> tuple[int, int]:
    """Return KV heads and head size of a layer with a window."""
    if "kv_lora_rank" in config:
        return full_attention(config)
    heads = config.number("swa_num_key_value_heads", default=0) or kv_heads(config)
    size = config.number("swa_head_dim", default=0) or head_size(config)
    return heads, _mean(size, config.get("swa_v_head_dim") or config.get("v_head_dim"))


def kv_heads(config: Config) -> int:
    default = 1 if config.flag("multi_query") else num_heads(config)
    return config.number("num_key_value_heads", "num_kv_heads", "multi_query_group_num", default=default)


def head_size(config: Config) -> int:
    return config.number("head_dim", "kv_channels", default=max(1, hidden_size(config) // num_heads(config)))


def _mean(of_keys: int, of_values: object) -> int:
    return (of_keys + (whole_number("v_head_dim", of_values) or of_keys) + 1) // 2


def _state(config: Config, kind: Kind) -> float:
    """Return the bytes of one request's state in a layer: the recurrent part in 32 bits, the convolution's in 16."""
    if kind is Kind.MAMBA:
        heads, size = mamba(config)
        width = config.number("ssm_state_size", "mamba_d_state", "state_size", default=128)
        return 4.0 * heads * size * width + 6.0 * (heads * size + 2 * mamba_groups(config) * width)
    if kind is Kind.CONVOLUTION:
        return 2.0 * hidden_size(config) * config.number("conv_L_cache", default=4)
    if kind is not Kind.LINEAR:
        return 0.0
    keys, of_key, values, of_value = linear(config)
    return 4.0 * values * of_key * of_value + 6.0 * (2 * keys * of_key + values * of_value)


def linear(config: Config) -> tuple[int, int, int, int]:
    """Return linear attention's heads and their size: of keys, and of values."""
    own = config.part("linear_attn_config")
    heads = whole_number("num_heads", own.get("num_heads")) or num_heads(config)
    size = whole_number("head_dim", own.get("head_dim")) or head_size(config)
    return (
        config.number("linear_num_key_heads", default=heads),
        config.number("linear_key_head_dim", default=size),
        config.number("linear_num_value_heads", default=heads),
        config.number("linear_value_head_dim", default=size),
    )


def mamba(config: Config) -> tuple[int, int]:
    """Return the heads of a state space layer, and their size."""
    size = config.number("mamba_head_dim", "mamba_d_head", default=64)
    wide = hidden_size(config) * config.number("mamba_expand", "expand", default=2)
    return config.number("mamba_num_heads", "mamba_n_heads", default=max(1, wide // size)), size


def mamba_groups(config: Config) -> int:
    return config.number("n_groups", "mamba_n_groups", default=1)
