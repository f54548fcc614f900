"""The number of weights in each part of a model, and the dimensions of its cache, computed from config.json.

Weights are counted separately for each part, because quantized checkpoints keep some parts in 16 bits. Norms and biases
are not counted, as they make up less than a thousandth of the weights. If safetensors headers can be read, their total
is used instead.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from deploy.resolve.model.files import Config, whole_number


class Kind(enum.Enum):
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
"""Maps words in `layer_types` and letters in `hybrid_override_pattern` to kinds of layers. Others count as FULL."""

_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "gemma4_text": 6, "cohere2": 4, "gpt_oss": 2}
"""Maps each model type whose config.json does not state the period of full attention to that period.

With a period of 6, every sixth layer has full attention.
"""

_EVERY_LAYER = ("mistral", "mixtral", "phi3", "starcoder2")
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
    """Return the kind of each layer. Unknown kinds count as full attention, which needs the most memory."""
    layers = config.layers()
    kinds_of_layers = _listed(config) or _by_pattern(config, layers)
    return (kinds_of_layers + [Kind.FULL] * layers)[:layers]


def _listed(config: Config) -> list[Kind]:
    """Return the kinds of layers from a list in config.json, or an empty list if there is no such list."""
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
    """Return the kinds of layers from the period of full attention in config.json or for the model type."""
    other = Kind.WINDOW
    if config.type in _HYBRIDS:
        period, other = config.number("full_attention_interval", default=4), Kind.LINEAR
    elif config.type.startswith("llama4") and "attention_chunk_size" in config:
        rope = config.list("no_rope_layers")  # a 1 means rotary embeddings, and so attention in chunks
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
    """Return the size of the sliding window in tokens, or None if config.json has no window."""
    return config.number("sliding_window", "sliding_window_size", "attention_chunk_size", default=0) or None


def cache(config: Config) -> Cache:
    """Return the dimensions of the cache that one request needs.

    Raises:
        SpecError: a value in config.json is missing or invalid.
    """
    of_layers = kinds(config)
    heads, head_dim = full_attention(config)
    # Gemma's last layers share the caches of earlier layers.
    own = of_layers[: max(len(of_layers) - config.number("num_kv_shared_layers", default=0), 0)]
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
    """Return the number of KV heads and the head size of a layer with full attention.

    If keys and values have different sizes, the head size is their mean.
    """
    if "kv_lora_rank" in config:  # latent attention: one vector for K and V together, on every GPU
        values = config.number("kv_lora_rank") + config.number("qk_rope_head_dim")
        if "index_head_dim" in config:  # sparse attention also caches its indexer's keys, with one byte per element
            values += (config.number("index_head_dim") + 4) // 2
        return 1, (values + 1) // 2
    heads = config.number("num_global_key_value_heads", default=0) or kv_heads(config)
    return heads, _mean(config.number("global_head_dim", default=0) or head_size(config), config.get("v_head_dim"))


def windowed_attention(config: Config) -> tuple[int, int]:
    """Return the number of KV heads and the head size of a layer with a sliding window."""
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
    """Return the bytes of one request's state in a layer: 4 for each recurrent value, 2 for each convolution value."""
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
    """Return the dimensions of linear attention: number and size of key heads, number and size of value heads."""
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
    """Return the number and the size of heads in a state space layer."""
    size = config.number("mamba_head_dim", "mamba_d_head", default=64)
    wide = hidden_size(config) * config.number("mamba_expand", "expand", default=2)
    return config.number("mamba_num_heads", "mamba_n_heads", default=max(1, wide // size)), size


def mamba_groups(config: Config) -> int:
    return config.number("n_groups", "mamba_n_groups", default=1)


def splits(config: Config, block: int, kept: Mapping[Part, float]) -> tuple[list[int], int | None]:
    """Return the sizes that a tensor parallel degree must divide, and the size of the experts, or None without experts.

    Widths are counted in quantization blocks, because vLLM and SGLang do not split a block across GPUs (vllm#17569,
    sglang#8344). A width that is not a multiple of the block size cannot be split.

    Args:
        block: number of weights in a block.
        kept: fraction of each part that is not quantized.
    """

    def parts(width: int, name: Part) -> int:
        size = 1 if kept.get(name, 0.0) >= 1 else block
        return width // size if width % size == 0 else 1

    weights, of_layers = count(config), kinds(config)
    dense = config.number("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden_size(config))
    of_expert = config.number("moe_intermediate_size", "expert_ffn_hidden_size", default=dense)
    ranges = []
    if weights["dense"]:
        ranges.append(parts(config.number("intermediate_size_mlp", default=dense), "dense"))
    if weights["shared"] and (width := _shared(config, of_expert, dense)):
        ranges.append(parts(width, "shared"))
    if Kind.FULL in of_layers or Kind.WINDOW in of_layers:
        values = whole_number("v_head_dim", config.get("v_head_dim")) or head_size(config)
        ranges.append(parts(num_heads(config) * values, "attention"))
    if Kind.LINEAR in of_layers:
        ranges += linear(config)[::2]
    if Kind.MAMBA in of_layers:
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

_OWN_ENDS = ("deepseek_v3", "deepseek_v32", "glm4_moe")
"""Model types whose layers for multi-token prediction are stored with their own embeddings and output layer."""

_ALONE = {"-", "E", "mlp", "moe"}
"""Words for layers that consist only of a feed-forward network."""

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
        parameters["attention"] += _mixer(config, kind, hidden)
        _feed_forward(config, number, kind, hidden, parameters, wide=number >= shared_from)
    for _ in range(min(config.number("num_nextn_predict_layers", default=0), 8)):  # multi-token prediction
        parameters["attention"] += _mixer(config, Kind.FULL, hidden) + 2 * hidden * hidden
        _feed_forward(config, len(of_layers) - 1, Kind.FULL, hidden, parameters)
        parameters["embeddings"] += 2 * vocabulary * hidden if config.type in _OWN_ENDS else 0
    parameters["media"] += sum(_encoder(config.part(name), hidden) for name in ("vision_config", "audio_config"))
    return parameters


def _per_layer_embeddings(config: Config, hidden: int) -> int:
    """Return the number of weights in Gemma's per-layer embeddings and their projections."""
    size = config.number("hidden_size_per_layer_input", default=0)
    if not size:
        return 0
    vocabulary = config.number("vocab_size_per_layer_input", default=config.number("vocab_size"))
    return config.layers() * size * (vocabulary + 3 * hidden)


def _mixer(config: Config, kind: Kind, hidden: int) -> int:
    """Return the number of weights in a layer's attention, or in the state space model or convolution in its place."""
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
    queries = num_heads(config) * size * (2 if config.type in _HYBRIDS else 1)
    return hidden * (queries + heads * size + values + num_heads(config) * of_values)


def _latent(config: Config, hidden: int) -> int:
    """Return the number of weights in a layer's latent attention and its indexer."""
    heads, rope = num_heads(config), config.number("qk_rope_head_dim")
    key, value = config.number("qk_nope_head_dim", default=128), config.number("v_head_dim", default=128)
    compressed, queries = config.number("kv_lora_rank"), config.number("q_lora_rank", default=0)
    parameters = hidden * (compressed + rope) + compressed * heads * (key + value) + heads * value * hidden
    parameters += queries * (hidden + heads * (key + rope)) if queries else hidden * heads * (key + rope)
    return parameters + _indexer(config, hidden, queries)


def _indexer(config: Config, hidden: int, queries: int) -> int:
    """Return the number of weights in a layer's indexer for sparse attention."""
    if "index_n_heads" not in config:
        return 0
    heads, size = config.number("index_n_heads"), config.number("index_head_dim")
    return queries * heads * size + hidden * (size + heads)


def _feed_forward(
    config: Config, number: int, kind: Kind, hidden: int, parameters: Counter[Part], *, wide: bool = False
) -> None:
    """Add the number of weights in a layer's feed-forward network to `parameters`.

    Args:
        number: index of the layer.
        wide: whether the layer may have a feed-forward network of double width (`use_double_wide_mlp`).
    """
    matrices = hidden * (2 if config.type in _TWO_MATRICES else 3)
    dense = config.number("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden)
    words = config.words()
    if not _ALONE.isdisjoint(words):  # each layer is either attention or a feed-forward network
        if words[number : number + 1] in (("-",), ("mlp",)):
            parameters["dense"] += matrices * dense
        if words[number : number + 1] not in (("E",), ("moe",)):
            return
    experts = config.number(*_EXPERTS, default=0)
    if not experts or _is_dense(config, number):
        dense = config.number("intermediate_size_mlp", default=dense)  # Llama 4: size in layers without experts
        parameters["dense"] += matrices * dense * (2 if wide and config.flag("use_double_wide_mlp") else 1)
        return
    of_expert = config.number("moe_intermediate_size", "expert_ffn_hidden_size", default=dense)
    size = config.number("moe_latent_size", "routed_expert_hidden_size", default=hidden)  # may be smaller for experts
    parameters["experts"] += matrices // hidden * size * of_expert * experts
    parameters["router"] += hidden * experts
    parameters["shared"] += matrices * _shared(config, of_expert, dense) + (2 * hidden * size if size != hidden else 0)
    if config.flag("enable_moe_block"):  # Gemma 4 has a dense network in addition to the experts
        parameters["dense"] += matrices * dense


def _shared(config: Config, of_expert: int, dense: int) -> int:
    """Return the total width of the shared experts, which every token uses."""
    if config.type.startswith("llama4"):
        return dense
    names = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
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
