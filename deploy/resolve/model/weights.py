"""The number of weights in each part of a model, and the dimensions of its cache, computed from config.json.

Weights are counted separately for each part, because quantized checkpoints keep some parts in 16 bits. Norms and biases
are not counted, as they make up less than a thousandth of the weights. If safetensors headers can be read, their total
is used instead.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deploy.resolve.model.files import LONGCAT, Config, part, whole_number


class LayerKind(enum.Enum):
    """The kind of a layer."""

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
    """No attention: a layer with only the feed-forward network."""


_NAMES = {
    "full_attention": LayerKind.FULL,
    "attention": LayerKind.FULL,
    "sliding_attention": LayerKind.WINDOW,
    "chunked_attention": LayerKind.WINDOW,
    "compressed_sparse_attention": LayerKind.WINDOW,
    "heavily_compressed_attention": LayerKind.WINDOW,
    "linear_attention": LayerKind.LINEAR,
    "mamba": LayerKind.MAMBA,
    "mamba2": LayerKind.MAMBA,
    "hybrid_sliding": LayerKind.WINDOW,
    "recurrent": LayerKind.CONVOLUTION,
    "conv": LayerKind.CONVOLUTION,
    "moe": LayerKind.NONE,
    "mlp": LayerKind.NONE,
    "M": LayerKind.MAMBA,
    "*": LayerKind.FULL,
    "-": LayerKind.NONE,
    "E": LayerKind.NONE,
}
"""Maps words in `layer_types` and letters in `hybrid_override_pattern` to kinds of layers. Others count as FULL."""

_PATTERNS = {
    "gemma2": 2, "gemma3_text": 6, "gemma3": 6, "gemma3n_text": 5, "gemma4_text": 6, "cohere2": 4, "gpt_oss": 2,
    "olmo3": 4, "vaultgemma": 2, "inkling_text": 6, "inkling2_text": 6, "inkling2_loop_text": 6,
}  # fmt: skip
"""Maps each model type whose config.json does not state the period of full attention to that period.

With a period of 6, every sixth layer has full attention.
"""

_EVERY_LAYER = (
    "mistral", "mixtral", "phi3", "starcoder2", "ministral", "moshi", "kyutai_speech_to_text", "voxtral_realtime",
    "voxtral_realtime_text",
)  # fmt: skip
"""Model types whose `sliding_window` applies to all layers."""

_HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
"""Model types with linear attention. In their other layers, the query projection also computes a gate of its size."""


@dataclass(frozen=True)
class Cache:
    """The dimensions of the cache that one request needs.

    Attributes:
        kv_heads: number of KV heads in layers with full attention.
        head_dim: head size in layers with full attention.
        window_layers: number of layers with a sliding window.
        window: size of the window in tokens, or None.
        window_kv_heads: number of KV heads in layers with a window, or None if it is `kv_heads`.
        window_head_dim: head size in layers with a window, or None if it is `head_dim`.
        uncached: number of layers that do not cache keys and values.
        state: total size of the fixed states of all layers, in bytes.
        extra: number of values per token that every GPU caches in addition, in all layers together.
        by_layer: number of KV heads in each layer with full attention, or () if it is always `kv_heads`.
    """

    kv_heads: int
    head_dim: int
    window_layers: int = 0
    window: int | None = None
    window_kv_heads: int | None = None
    window_head_dim: int | None = None
    uncached: int = 0
    state: float = 0.0
    extra: float = 0.0
    by_layer: tuple[int, ...] = ()


def kinds(config: Config) -> list[LayerKind]:
    """Return the kind of each layer. Unknown kinds count as full attention, which needs the most memory."""
    layers = config.layers()
    kinds_of_layers = _listed(config) or _by_group(config, layers) or _by_pattern(config, layers)
    return (kinds_of_layers + [LayerKind.FULL] * layers)[:layers]


def _listed(config: Config) -> list[LayerKind]:
    """Return the kinds of layers from a list in config.json, or an empty list if there is no such list."""
    if config.words():
        return [_NAMES.get(word, LayerKind.FULL) for word in config.words()]
    if blocks(config):  # Nemotron-NAS
        return [LayerKind.NONE if _replaced(part(item, "attention")) else LayerKind.FULL for item in blocks(config)]
    if config.list("compress_ratios"):  # DeepSeek-V4: each layer also has a window
        return [LayerKind.WINDOW] * config.layers()
    if config.list("hybrid_layer_pattern"):  # MiMo-V2
        return [LayerKind.WINDOW if item == 1 else LayerKind.FULL for item in config.list("hybrid_layer_pattern")]
    if config.list("attn_type_list"):  # MiniMax-Text-01
        return [LayerKind.FULL if item == 1 else LayerKind.LINEAR for item in config.list("attn_type_list")]
    if config.list("block_types"):
        return _recurrent(config)
    for name, (kind, other) in _NUMBERED.items():
        if config.list(name):
            return _at(config, config.list(name), kind, other)
    full = config.part("linear_attn_config").get("full_attn_layers")  # Kimi Linear; counted from 1
    if isinstance(full, list):
        numbers = {item for item in full if isinstance(item, int)}
        return [LayerKind.FULL if number in numbers else LayerKind.LINEAR for number in range(1, config.layers() + 1)]
    return []


def _recurrent(config: Config) -> list[LayerKind]:
    """Return the kinds of RecurrentGemma's layers, whose list repeats."""
    pattern = [
        _NAMES["recurrent" if item == "recurrent" else "sliding_attention"] for item in config.list("block_types")
    ]
    return [pattern[number % len(pattern)] for number in range(config.layers())]


_NUMBERED = {
    "attn_layer_indices": (LayerKind.FULL, LayerKind.MAMBA),  # Bamba
    "full_attn_idxs": (LayerKind.FULL, LayerKind.CONVOLUTION),  # LFM2
    "hybrid_layer_ids": (LayerKind.FULL, LayerKind.MAMBA),  # Zamba2
    "local_layer_ids": (LayerKind.WINDOW, LayerKind.FULL),  # Inkling
}
"""Maps each list of numbers of layers to the kind of these layers, and of the others."""


def _at(config: Config, numbers: Sequence[object], kind: LayerKind, other: LayerKind) -> list[LayerKind]:
    """Return `kind` for the layers with these numbers, counted from 0, and `other` for all other layers."""
    return [kind if number in numbers else other for number in range(config.layers())]


def _by_group(config: Config, layers: int) -> list[LayerKind]:
    """Return the kinds of layers from `layer_group_size`, or an empty list.

    Only the last layer of a group has full attention. Before Ling 3.0, layers in an incomplete group also had it.
    """
    size = config.number("layer_group_size", default=0)
    if not size:
        return []
    grouped = layers if config.type == "bailing_hybrid" else layers // size * size
    return [
        LayerKind.FULL if number % size == 0 or number > grouped else LayerKind.LINEAR
        for number in range(1, layers + 1)
    ]


def _by_letters(pattern: str, layers: int) -> list[LayerKind]:
    """Return the kinds of layers from a pattern such as `LLLG` (local or global), which repeats until the last layer.

    The last layer is always global.
    """
    kinds_of_layers = [
        LayerKind.WINDOW if pattern[number % len(pattern)] == "L" else LayerKind.FULL for number in range(layers)
    ]
    return [*kinds_of_layers[:-1], LayerKind.FULL]


def blocks(config: Config) -> tuple[Mapping[str, Any], ...]:
    """Return the description of each layer in `block_configs` (Nemotron-NAS), or () if there is no such list."""
    listed = tuple(item if isinstance(item, Mapping) else {} for item in config.list("block_configs"))
    empty: Mapping[str, Any] = {}
    return (*listed, *[empty] * config.layers())[: config.layers()] if listed else ()


def _replaced(block: Mapping[str, Any]) -> bool:
    """Return whether a block's attention or feed-forward network was removed, or replaced by one matrix."""
    return bool(block.get("no_op") or block.get("replace_with_linear"))


def _by_pattern(config: Config, layers: int) -> list[LayerKind]:
    """Return the kinds of layers from the period of full attention in config.json or for the model type."""
    other = LayerKind.WINDOW
    if config.type in _HYBRIDS or "full_attention_interval" in config:
        period, other = config.number("full_attention_interval", default=4), LayerKind.LINEAR
    elif "attn_layer_period" in config:
        return _at(config, _jambas(config, layers), LayerKind.FULL, LayerKind.MAMBA)
    elif config.type.startswith("llama4") and "attention_chunk_size" in config:
        rope = config.list("no_rope_layers")  # a 1 means rotary embeddings, and so attention in chunks
        if rope:
            return [LayerKind.WINDOW if item else LayerKind.FULL for item in rope]
        period = config.number("no_rope_layer_interval", default=4)
    elif window(config) is None or config.get("use_sliding_window") is False:
        return []
    elif config.type in _EVERY_LAYER:
        return [LayerKind.WINDOW] * layers
    elif isinstance(pattern := config.get("sliding_window_pattern"), str):
        return _by_letters(pattern, layers) if pattern else []
    else:
        names = ("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")
        period = config.number(*names, default=_PATTERNS.get(config.type, 1))
    return [LayerKind.FULL if number % period == 0 else other for number in range(1, layers + 1)]


def window(config: Config) -> int | None:
    """Return the size of the sliding window in tokens, or None if config.json has no window."""
    names = ("sliding_window", "sliding_window_size", "attention_chunk_size", "attention_window_size")
    return config.number(*names, default=0) or None


def _jambas(config: Config, layers: int) -> Sequence[int]:
    """Return the numbers of Jamba's and Zamba's layers with attention."""
    offset = config.explicit("attn_layer_offset", default=0)
    numbers = range(offset, layers, config.number("attn_layer_period"))
    return [2, *(number + 3 for number in numbers)] if config.type == "zamba" else numbers


def cache(config: Config) -> Cache:
    """Return the dimensions of the cache that one request needs.

    Raises:
        SpecError: a value in config.json is missing or invalid.
    """
    of_layers = kinds(config)
    # Gemma's last layers share the caches of earlier layers.
    num_caching = max(len(of_layers) - config.number("num_kv_shared_layers", default=0), 0)
    caching_layers = of_layers[:num_caching]
    heads, head_dim = _largest(config, LayerKind.FULL, of_layers)
    window_heads, window_dim = _largest(config, LayerKind.WINDOW, of_layers)
    cached = [of_layers[number] for number in runs(config) if number < num_caching]
    window_layers = cached.count(LayerKind.WINDOW)
    return Cache(
        kv_heads=heads,
        head_dim=head_dim,
        window_layers=window_layers,
        window=window(config) if window_layers else None,
        window_kv_heads=window_heads if window_layers and window_heads != heads else None,
        window_head_dim=window_dim if window_layers and window_dim != head_dim else None,
        uncached=len(runs(config)) - sum(kind in (LayerKind.FULL, LayerKind.WINDOW) for kind in cached),
        state=sum(_state(config, kind) for kind in cached) + _hybrids(config) * _state(config, LayerKind.MAMBA),
        extra=_compressed_entries(config) + _index_keys(config, caching_layers),
        by_layer=_heads_by_layer(config, caching_layers) if heads == kv_heads(config) else (),
    )


def _largest(config: Config, kind: LayerKind, of_layers: Sequence[LayerKind]) -> tuple[int, int]:
    """Return the number of KV heads and the head size of the layers of a kind, or the largest if they differ."""
    size = full_attention if kind is LayerKind.FULL else windowed_attention
    numbers = [number for number, item in enumerate(of_layers) if item is kind and "per_layer_config" in config]
    return max((size(config.of(number)) for number in numbers), key=math.prod, default=size(config))


def _hybrids(config: Config) -> int:
    """Return the number of layers with attention that also have a state space model (Falcon-H1, Zamba2)."""
    return config.words().count("hybrid") or len(config.list("hybrid_layer_ids"))


def runs(config: Config) -> list[int]:
    """Return the number of the layer for each attention that has a cache of its own.

    A layer that runs several times for a token has a cache for each run.
    """
    layers = config.layers()
    section, times = range(layers), 1
    if config.type.startswith(LONGCAT) and "num_layers" in config:
        times = 2
    elif config.type == "ouro":
        times = config.number("total_ut_steps", default=4)
    elif "loop_num_passes" in config:  # Inkling 2
        times = config.number("loop_num_passes")
        section = range(config.explicit("loop_layer_index_start", default=0), config.number("loop_layer_index_end"))
    elif "n_recurrent_loops" in config and config.get("recurrent_kv_cache_mode") != "last_loop":  # Dory
        times = config.number("n_recurrent_loops")
        outer = [config.explicit(name, default=0) for name in ("n_input_layers", "n_output_layers")]
        section = range(outer[0], layers - outer[1])
    repeated = [*range(section.start, min(section.stop, layers))]
    return [*range(layers), *repeated * (min(times, _MAX_RUNS) - 1)]


_MAX_RUNS = 64


def _heads_by_layer(config: Config, caching_layers: Sequence[LayerKind]) -> tuple[int, ...]:
    """Return the number of KV heads in each layer with full attention, or () if it is the same in all."""
    heads = tuple(kv_heads(config, number) for number, kind in enumerate(caching_layers) if kind is LayerKind.FULL)
    return heads if len(set(heads)) > 1 else ()


_RATIOS = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_INDEXED_RATIO = 4
"""DeepSeek-V4's compression of the layers that select among the compressed entries, and so cache index keys."""


def _compressed_entries(config: Config) -> float:
    """Return the values per token in DeepSeek-V4's compressed caches, of which each stores keys and values as one."""
    index = config.number("index_head_dim", default=0)
    entries = ((head_size(config) + (index if ratio == _INDEXED_RATIO else 0), ratio) for ratio in _ratios(config))
    return sum(size / ratio for size, ratio in entries if ratio)


def _ratios(config: Config) -> list[int]:
    """Return by how much each layer compresses its cache."""
    if config.words():
        rates = {**_RATIOS, **config.part("compress_rates")}
        return [whole_number("compress_rates", rates[word]) for word in config.words() if word in _RATIOS]
    numbers = config.list("compress_ratios")[: config.layers()]
    return [whole_number("compress_ratios", number) for number in numbers]


def _index_keys(config: Config, caching_layers: Sequence[LayerKind]) -> float:
    """Return the values per token in the index keys of sparse attention. Each layer has one head of them."""
    sparse = config.part("sparse_attention_config")  # MiniMax-M3, with 16 bits per value
    listed = sparse.get("sparse_attention_freq")
    layers = sum(item == 1 for item in listed[: len(caching_layers)]) if isinstance(listed, list) else 0
    layers = layers or config.words()[: len(caching_layers)].count("minimax_m3_sparse")
    size = whole_number("sparse_index_dim", sparse.get("sparse_index_dim"))
    if layers:
        return float(layers * (size or config.number("index_head_dim", default=0)))
    size = config.number("index_head_dim", default=0)
    if "kv_lora_rank" not in config or not size:
        return 0.0
    # DeepSeek's sparse attention, with 8 bits per value and a scale of 32 bits; a value here has 16 bits.
    return indexers(config, caching_layers) * (size + 4) / 2


def indexers(config: Config, caching_layers: Sequence[LayerKind]) -> int:
    """Return the number of layers with full attention that have an indexer. Others may share that of a layer before."""
    full = [number for number, kind in enumerate(caching_layers) if kind is LayerKind.FULL]
    words: Sequence[object] = config.list("indexer_types")
    letters = config.get("index_topk_pattern")
    if not words and isinstance(letters, str):
        words = letters
    return sum(number >= len(words) or words[number] not in ("shared", "S") for number in full)


def num_heads(config: Config) -> int:
    return config.number("num_attention_heads", "n_head", "n_heads")


def hidden_size(config: Config) -> int:
    return config.number("hidden_size", "n_embd", "d_model")


def full_attention(config: Config) -> tuple[int, int]:
    """Return the number of KV heads and the head size of a layer with full attention.

    If keys and values have different sizes, the head size is their mean.
    """
    if "kv_lora_rank" in config:  # latent attention: one vector for K and V together, on every GPU
        return 1, (config.number("kv_lora_rank") + rope_size(config) + 1) // 2
    if "o_lora_rank" in config:  # DeepSeek-V4: one latent is both key and value
        return 1, (head_size(config) + 1) // 2
    heads = config.number("num_global_key_value_heads", default=0) or kv_heads(config)
    return heads, _mean(config.number("global_head_dim", default=0) or head_size(config), config.get("v_head_dim"))


def windowed_attention(config: Config) -> tuple[int, int]:
    """Return the number of KV heads and the head size of a layer with a sliding window."""
    if "kv_lora_rank" in config or "o_lora_rank" in config:
        return full_attention(config)
    heads = config.number("swa_num_key_value_heads", default=0) or kv_heads(config)
    size = config.number("swa_head_dim", default=0) or head_size(config)
    return heads, _mean(size, config.get("swa_v_head_dim") or config.get("v_head_dim"))


_KV_HEADS = (
    "num_key_value_heads", "num_kv_heads", "num_key_value_heads_per_layer", "multi_query_group_num",
    "num_attention_groups",
)  # fmt: skip


def kv_heads(config: Config, layer: int | None = None) -> int:
    """Return the number of KV heads of a layer, or the largest number in any layer."""
    default = 1 if config.flag("multi_query") else num_heads(config)
    groups = [_group(item) for item in blocks(config)]
    if any(groups):
        group = min(filter(None, groups)) if layer is None else groups[layer]
        return max(1, num_heads(config) // (group or 1))
    if layer is None:
        return config.number(*_KV_HEADS, default=default)
    return config.of_layer(layer, *_KV_HEADS, default=default)


def _group(block: Mapping[str, Any]) -> int:
    return whole_number("n_heads_in_group", part(block, "attention").get("n_heads_in_group"))


def rope_size(config: Config) -> int:
    """Return the size of the part of a latent key with rotary embeddings, which may be 0."""
    return config.explicit("qk_rope_head_dim", default=64)


def head_size(config: Config) -> int:
    width = hidden_size(config) * (2 if config.type.startswith("zamba") else 1)
    return config.number("head_dim", "attention_head_dim", "kv_channels", default=max(1, width // num_heads(config)))


def _mean(of_keys: int, of_values: object) -> int:
    return (of_keys + (whole_number("v_head_dim", of_values) or of_keys) + 1) // 2


def _state(config: Config, kind: LayerKind) -> float:
    """Return the bytes of one request's state in a layer: 4 for each recurrent value, 2 for each convolution value."""
    if kind is LayerKind.MAMBA:
        heads, size = mamba(config)
        width = config.number("ssm_state_size", "mamba_d_state", "state_size", default=128)
        return 4.0 * heads * size * width + 6.0 * (heads * size + 2 * mamba_groups(config) * width)
    if kind is LayerKind.CONVOLUTION:
        return 2.0 * hidden_size(config) * config.number("conv_L_cache", default=4)
    if kind is not LayerKind.LINEAR:
        return 0.0
    keys, of_key, values, of_value = linear(config)
    return 4.0 * values * of_key * of_value + 6.0 * (2 * keys * of_key + values * of_value)


def linear(config: Config) -> tuple[int, int, int, int]:
    """Return the dimensions of linear attention: number and size of key heads, number and size of value heads."""
    section = config.part("linear_attn_config")
    heads = whole_number("num_heads", section.get("num_heads")) or num_heads(config)
    size = whole_number("head_dim", section.get("head_dim")) or head_size(config)
    return (
        config.number("linear_num_key_heads", "linear_num_heads", default=heads),
        config.number("linear_key_head_dim", "linear_head_dim", default=size),
        config.number("linear_num_value_heads", "linear_num_heads", default=heads),
        config.number("linear_value_head_dim", "linear_head_dim", default=size),
    )


def mamba(config: Config) -> tuple[int, int]:
    """Return the number and the size of heads in a state space layer."""
    size = config.number("mamba_head_dim", "mamba_d_head", "mamba_headdim", default=64)
    wide = hidden_size(config) * config.number("mamba_expand", "expand", default=2)
    return config.number("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", default=max(1, wide // size)), size


def mamba_groups(config: Config) -> int:
    return config.number("n_groups", "mamba_n_groups", "mamba_ngroups", default=1)


def splits(config: Config, block: int, unquantized: Mapping[Part, float]) -> tuple[list[int], int | None]:
    """Return the sizes that a tensor parallel degree must divide, and the size of the experts, or None without experts.

    Widths are counted in quantization blocks, because vLLM and SGLang do not split a block across GPUs (vllm#17569,
    sglang#8344). A width that is not a multiple of the block size cannot be split.

    Args:
        block: number of weights in a block.
        unquantized: fraction of each part that is not quantized.
    """

    def parts(width: int, name: Part) -> int:
        size = 1 if unquantized.get(name, 0.0) >= 1 else block
        return width // size if width % size == 0 else 1

    weights, of_layers = count(config), kinds(config)
    dense = config.number("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden_size(config))
    of_expert = config.number("moe_intermediate_size", "expert_ffn_hidden_size", default=dense)
    ranges = []
    if weights["dense"]:
        widths = [_width(part(item, "ffn"), hidden_size(config)) for item in blocks(config)]
        wide = math.gcd(*widths) or config.number(*_DENSE, default=dense)
        ranges.append(parts(wide, "dense"))
    if weights["shared"] and (width := _shared(config, of_expert, dense)):
        ranges.append(parts(width, "shared"))
    if LayerKind.FULL in of_layers or LayerKind.WINDOW in of_layers:
        values = whole_number("v_head_dim", config.get("v_head_dim")) or head_size(config)
        ranges.append(parts(num_heads(config) * values, "attention"))
    if LayerKind.LINEAR in of_layers:
        ranges += linear(config)[::2]
    if LayerKind.MAMBA in of_layers:
        ranges.append(mamba(config)[0])
    return ranges, parts(of_expert, "experts") if weights["experts"] else None


Part = Literal["embeddings", "head", "attention", "dense", "experts", "shared", "router", "media"]
Weights = Mapping[Part, float]
"""Numbers of weights by part. `shared` are experts that every token uses, `media` are encoders of images and audio."""

_TWO_MATRICES = (
    "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2", "mpt", "nemotron",
    "nemotron_h",
)  # fmt: skip
"""Model types whose feed-forward networks have no gate, and therefore have two matrices instead of three."""

_SEPARATE_ENDS = ("deepseek_v3", "deepseek_v32", "glm4_moe")
"""Model types whose layers for multi-token prediction are stored with their own embeddings and output layer."""

_ALONE = {"-", "E", "mlp", "moe"}
"""Words for layers that consist only of a feed-forward network."""

_DENSE = ("intermediate_size_mlp", "dense_intermediate_size")
"""Sizes of the feed-forward network in layers without experts (Llama 4, MiniMax-M3), if they are different."""

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def count(config: Config) -> Weights:
    """Return the number of weights in each part, including layers for multi-token prediction.

    Raises:
        SpecError: a value in config.json is missing or invalid.
    """
    parameters = Counter[Part]()
    hidden, vocabulary = hidden_size(config), config.number("vocab_size", "padded_vocab_size")
    parameters["embeddings"] = vocabulary * hidden + _per_layer_embeddings(config, hidden)
    parameters["head"] = 0 if config.flag("tie_word_embeddings") else vocabulary * hidden
    of_layers = kinds(config)
    shared_from = len(of_layers) - config.number("num_kv_shared_layers", default=0)
    for number, kind in enumerate(of_layers):
        parameters["attention"] += _mixer(config, kind, hidden, number)
        _feed_forward(config, number, kind, hidden, parameters, wide=number >= shared_from)
    drafts = config.number("num_nextn_predict_layers", "num_mtp_layers", default=0)
    for _ in range(min(drafts, 8)):  # multi-token prediction
        parameters["attention"] += _mixer(config, LayerKind.FULL, hidden, len(of_layers) - 1) + 2 * hidden * hidden
        _feed_forward(config, len(of_layers) - 1, LayerKind.FULL, hidden, parameters)
        parameters["embeddings"] += 2 * vocabulary * hidden if config.type in _SEPARATE_ENDS else 0
    parameters["media"] += sum(_encoder(config.part(name), hidden) for name in ("vision_config", "audio_config"))
    return parameters


def _per_layer_embeddings(config: Config, hidden: int) -> int:
    """Return the number of weights in Gemma's per-layer embeddings and their projections."""
    size = config.number("hidden_size_per_layer_input", default=0)
    if not size:
        return 0
    vocabulary = config.number("vocab_size_per_layer_input", default=config.number("vocab_size"))
    return config.layers() * size * (vocabulary + 3 * hidden)


def _mixer(config: Config, kind: LayerKind, hidden: int, layer: int) -> int:
    """Return the number of weights in a layer's attention, or in the state space model or convolution in its place."""
    if blocks(config) and part(blocks(config)[layer], "attention").get("replace_with_linear"):
        return hidden * hidden
    if kind is LayerKind.MAMBA:
        heads, size = mamba(config)
        width = config.number("ssm_state_size", "mamba_d_state", "state_size", default=128)
        return hidden * (3 * heads * size + 2 * mamba_groups(config) * width + heads)
    if kind is LayerKind.LINEAR:
        keys, of_key, values, of_value = linear(config)
        return hidden * (2 * keys * of_key + 3 * values * of_value + 2 * values)
    if kind is LayerKind.CONVOLUTION:
        return 4 * hidden * hidden
    if kind is LayerKind.NONE:
        return 0
    if "o_lora_rank" in config:
        return _compressed(config, hidden)
    return _latent(config, hidden) if "kv_lora_rank" in config else _grouped(config, kind, hidden, layer)


def _compressed(config: Config, hidden: int) -> int:
    """Return the number of weights in a layer of DeepSeek-V4's attention, without its small compressors."""
    queries, out = config.number("q_lora_rank", default=hidden), config.number("o_lora_rank")
    width, groups = num_heads(config) * head_size(config), config.number("o_groups", default=1)
    return hidden * (queries + head_size(config) + groups * out) + width * (queries + out)


def _grouped(config: Config, kind: LayerKind, hidden: int, layer: int) -> int:
    size, heads = head_size(config), kv_heads(config, layer)
    if kind is LayerKind.WINDOW:
        heads = windowed_attention(config)[0]
        size = config.number("swa_head_dim", default=size)
    elif "global_head_dim" in config:
        heads = full_attention(config)[0]
        size = config.number("global_head_dim")
    of_values = whole_number("v_head_dim", config.get("v_head_dim")) or size
    values = 0 if kind is LayerKind.FULL and config.flag("attention_k_eq_v") else heads * of_values
    queries = num_heads(config) * size * (2 if config.type in _HYBRIDS else 1)
    return hidden * (queries + heads * size + values + num_heads(config) * of_values)


def _latent(config: Config, hidden: int) -> int:
    """Return the number of weights in a layer's latent attention and its indexer."""
    heads, rope = num_heads(config), rope_size(config)
    key, value = config.explicit("qk_nope_head_dim", default=128), config.number("v_head_dim", default=128)
    compressed, queries = config.number("kv_lora_rank"), config.number("q_lora_rank", default=0)
    parameters = hidden * (compressed + rope) + compressed * heads * (key + value) + heads * value * hidden
    parameters += queries * (hidden + heads * (key + rope)) if queries else hidden * heads * (key + rope)
    return parameters + _indexer(config, hidden, queries)


def _indexer(config: Config, hidden: int, queries: int) -> int:
    """Return the number of weights in a layer's indexer for sparse attention."""
    if "index_n_heads" not in config:
        return 0
    heads, size = config.number("index_n_heads", default=0), config.number("index_head_dim", default=0)
    return queries * heads * size + hidden * (size + heads)


def _feed_forward(
    config: Config, number: int, kind: LayerKind, hidden: int, parameters: Counter[Part], *, wide: bool = False
) -> None:
    """Add the number of weights in a layer's feed-forward network to `parameters`.

    Args:
        number: index of the layer.
        wide: whether the layer may have a feed-forward network of double width (`use_double_wide_mlp`).
    """
    matrices = hidden * (2 if config.type in _TWO_MATRICES else 3)
    if blocks(config):
        ffn = part(blocks(config)[number], "ffn")
        parameters["dense"] += hidden * hidden if ffn.get("replace_with_linear") else matrices * _width(ffn, hidden)
        return
    dense = config.of_layer(number, "intermediate_size", "ffn_dim", "n_inner", default=4 * hidden)
    words = config.words()
    if not _ALONE.isdisjoint(words):  # each layer is either attention or a feed-forward network
        if words[number : number + 1] in (("-",), ("mlp",)):
            parameters["dense"] += matrices * dense
        if words[number : number + 1] not in (("E",), ("moe",)):
            return
    experts = config.number(*_EXPERTS, default=0)
    if not experts or _is_dense(config, number):
        dense = config.number(*_DENSE, default=dense)
        parameters["dense"] += matrices * dense * (2 if wide and config.flag("use_double_wide_mlp") else 1)
        return
    of_expert = config.number("moe_intermediate_size", "expert_ffn_hidden_size", default=dense)
    size = config.number("moe_latent_size", "routed_expert_hidden_size", default=hidden)  # may be smaller for experts
    parameters["experts"] += matrices // hidden * size * of_expert * experts
    parameters["router"] += hidden * experts
    parameters["shared"] += matrices * _shared(config, of_expert, dense) + (2 * hidden * size if size != hidden else 0)
    if config.flag("enable_moe_block"):  # Gemma 4 has a dense network in addition to the experts
        parameters["dense"] += matrices * dense


def _width(ffn: Mapping[str, Any], hidden: int) -> int:
    """Return the size of a feed-forward network in `block_configs`, which may be 0."""
    if _replaced(ffn):
        return 0
    if (size := whole_number("intermediate_size", ffn.get("intermediate_size"))) > 0:
        return size
    multiple = ffn.get("ffn_mult")
    factor = float(multiple) if isinstance(multiple, int | float) and 0 <= multiple <= _LARGEST_FACTOR else 0.0
    return -(-int(2 * factor * hidden / 3) // _MULTIPLE) * _MULTIPLE


_LARGEST_FACTOR = 64
_MULTIPLE = 256
"""Size of which a feed-forward network of `ffn_mult` is a multiple."""


def _shared(config: Config, of_expert: int, dense: int) -> int:
    """Return the total width of the shared experts, which every token uses."""
    if config.type.startswith("llama4"):
        return dense
    names = (
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size",
        "share_expert_dim",
    )  # fmt: skip
    return config.number(*names, default=of_expert * config.number("n_shared_experts", "num_shared_experts", default=0))


def _is_dense(config: Config, number: int) -> bool:
    """Return whether a layer of a mixture-of-experts model has no experts."""
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
    """Estimate the number of weights in an encoder of images or audio, with its projection into the model."""
    of_encoder = Config(part)
    if "hidden_size" not in of_encoder:
        return 0
    width = of_encoder.number("hidden_size")
    layers = of_encoder.number("num_hidden_layers", "depth", default=0, largest=4096)
    wide = of_encoder.number("intermediate_size", "mlp_dim", default=4 * width)
    matrices = 3 if of_encoder.type in ("pixtral", "gemma4_vision", "qwen2_5_vl") else 2
    return layers * (4 * width * width + matrices * width * wide) + 4 * width * hidden
