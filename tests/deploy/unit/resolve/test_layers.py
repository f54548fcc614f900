"""What layers keep of a request, by the kind of their attention, and what that makes of a cache."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from deploy.resolve.fit import CHUNK, Need
from deploy.resolve.model.files import Config
from deploy.resolve.model.quantization import quantization
from deploy.resolve.model.shape import known_model
from deploy.resolve.model.weights import Cache, Kind, cache, count, kinds
from deploy.spec.sections import Shape
from tests.one_test import in_one_test

GIB = 1 << 30
PLAIN = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 8,
         "vocab_size": 100, "intermediate_size": 64}  # fmt: skip


@in_one_test(
    ("config", "expected"),
    [
        ({}, {Kind.FULL: 8}),
        ({"layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window": 4},
         {Kind.WINDOW: 4, Kind.FULL: 4}),
        ({"layer_types": ["linear_attention"] * 6 + ["attention", "odd"]}, {Kind.LINEAR: 6, Kind.FULL: 2}),
        ({"layer_types": ["mamba"] * 3}, {Kind.MAMBA: 3, Kind.FULL: 5}),  # the list is too short
        ({"layer_types": ["mamba"] * 30}, {Kind.MAMBA: 8}),
        ({"layer_types": "all"}, {Kind.FULL: 8}),
        ({"layers_block_type": ["mamba", "attention"] * 4}, {Kind.MAMBA: 4, Kind.FULL: 4}),
        ({"hybrid_override_pattern": "MEM*-EM*"}, {Kind.MAMBA: 3, Kind.NONE: 3, Kind.FULL: 2}),
        ({"model_type": "gemma2", "sliding_window": 4096}, {Kind.WINDOW: 4, Kind.FULL: 4}),
        ({"model_type": "gemma3_text", "sliding_window": 512}, {Kind.WINDOW: 7, Kind.FULL: 1}),
        ({"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 2},
         {Kind.WINDOW: 4, Kind.FULL: 4}),
        ({"model_type": "gpt_oss", "sliding_window": 128}, {Kind.WINDOW: 4, Kind.FULL: 4}),
        ({"model_type": "mistral", "sliding_window": 4096}, {Kind.WINDOW: 8}),
        ({"model_type": "mistral", "sliding_window": None}, {Kind.FULL: 8}),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, {Kind.FULL: 8}),
        ({"model_type": "new", "sliding_window": 4096}, {Kind.FULL: 8}),  # which layers have it is not said
        ({"model_type": "qwen3_next"}, {Kind.LINEAR: 6, Kind.FULL: 2}),
        ({"model_type": "llama4_text", "attention_chunk_size": 8192}, {Kind.WINDOW: 6, Kind.FULL: 2}),
        ({"model_type": "llama4_text", "attention_chunk_size": 8192, "no_rope_layers": [1, 0] * 4},
         {Kind.WINDOW: 4, Kind.FULL: 4}),
        ({"hybrid_layer_pattern": [0, 1] * 4, "sliding_window": 128}, {Kind.WINDOW: 4, Kind.FULL: 4}),
        ({"attn_type_list": [0, 0, 0, 1] * 2}, {Kind.LINEAR: 6, Kind.FULL: 2}),
        ({"linear_attn_config": {"full_attn_layers": [4, 8], "num_heads": 8, "head_dim": 16}},
         {Kind.LINEAR: 6, Kind.FULL: 2}),
    ],
)  # fmt: skip
def test_kinds_of_layers(config: dict[str, Any], expected: dict[Kind, int]) -> None:
    assert Counter(kinds(Config({**PLAIN, **config}))) == expected


@in_one_test(
    ("name", "expected"),
    [
        ("openai/gpt-oss-20b", Cache(8, 64, window_layers=12, window=128)),
        ("meta-llama/Llama-4-Scout-17B-16E", Cache(8, 128, window_layers=36, window=8192)),
        ("google/gemma-4-31B-it",
         Cache(4, 512, window_layers=50, window=1024, window_kv_heads=16, window_head_dim=256)),
        ("deepseek-ai/DeepSeek-V3.1", Cache(1, 288)),
        ("deepseek-ai/DeepSeek-V3.2", Cache(1, 354)),  # and the indexer's keys: 128 bytes, and a scale of 4
        # 36 layers of Gated DeltaNet: 32 heads of 128 x 128 in 32 bits, and three columns of 8192 in 16
        ("Qwen/Qwen3-Next-80B-A3B-Instruct",
         Cache(2, 256, uncached=36, state=36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2.0))),
        # Mamba-2 in 23 layers, attention in 6, feed-forward alone in 23
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
         Cache(2, 128, uncached=46, state=23 * (64 * 64 * 128 * 4 + 3 * (64 * 64 + 2 * 8 * 128) * 2.0))),
        # Keys of 192 and values of 128
        ("XiaomiMiMo/MiMo-V2-Flash", Cache(4, 160, window_layers=39, window=128, window_kv_heads=8)),
    ],
)  # fmt: skip
def test_what_known_models_keep(name: str, expected: Cache) -> None:
    shape = known_model(name)
    assert shape is not None
    assert (
        Cache(
            shape.kv_heads,
            shape.head_dim,
            shape.window_layers,
            shape.window,
            shape.window_kv_heads,
            shape.window_head_dim,
            shape.uncached_layers,
            shape.state,
        )
        == expected
    )


def test_layers_that_share_keep_nothing() -> None:
    """Gemma's smallest: the last layers take K and V of earlier ones."""
    found = cache(Config({**PLAIN, "num_kv_shared_layers": 3}))
    assert found.uncached == 3
    assert cache(Config({**PLAIN, "num_kv_shared_layers": 99})).uncached == 8


MIXED = Shape(parameters=1e9, layers=10, kv_heads=2, head_dim=64, window_layers=6, window=1024, window_kv_heads=4,
              window_head_dim=32, uncached_layers=2, state=3e6)  # fmt: skip


def test_the_cache_of_a_mixed_model_by_hand() -> None:
    need = Need(MIXED, context=100_000, windows=True)
    full, windowed = 2 * 2 * 2 * 64 * 2, 2 * 6 * 4 * 32 * 2  # K and V; layers; heads; size; bytes
    kept = 1024 + CHUNK
    assert need.kv_gib(100_000, 1) * GIB == pytest.approx(3e6 + full * 100_000 + windowed * kept)
    assert need.kv_gib(500, 1) * GIB == pytest.approx(3e6 + (full + windowed) * 500)
    assert need.kv_gib(500, 2) * GIB == pytest.approx((3e6 + (full + windowed) * 500) / 2)
    assert Need(MIXED, context=100_000).kv_gib(100_000, 1) * GIB == pytest.approx(3e6 + (full + windowed) * 100_000)


@in_one_test("tokens", [1, 700, 9000, 9216, 9217, 50_000, 99_999])
@in_one_test("windows", [True, False])
def test_room_for_a_shorter_request(tokens: int, windows: bool) -> None:
    need = Need(MIXED, context=100_000, windows=windows)
    assert need.cached(need.kv_gib(tokens, 1) * (1 + 1e-9), 1) == tokens
    assert need.cached(need.kv_gib(tokens, 1) * (1 - 1e-6), 1) == tokens - 1


def test_room_for_requests_of_the_full_context() -> None:
    need = Need(MIXED, context=100_000, windows=True)
    whole = need.kv_gib(100_000, 1)
    assert need.cached(2.5 * whole, 1) == pytest.approx(250_000, abs=1)
    assert need.cached(-1.0, 1) == 0
    assert need.cached(1e6 / GIB, 1) == 0  # less than a request's states


def test_a_model_without_any_cache() -> None:
    need = Need(Shape(parameters=1e9, layers=4, kv_heads=1, head_dim=1, uncached_layers=4, state=1e6), context=1000)
    assert need.cached(0.5e6 / GIB, 1) == 0
    assert need.cached(3e6 / GIB, 1) == pytest.approx(3000, abs=1)


@in_one_test(
    ("said", "dtype", "width", "kept"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "int4", 0.5 + 2.5 / 128, {}),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, "int4", 0.5 + 2 / 32, {}),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "int8", 1, {}),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}, "mxfp4", 0.53125,
         {"attention": 1.0}),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert":
          [f"model.layers.{number}.self_attn.q_proj" for number in (0, 1)]}, "fp8", 1, {"attention": 0.25}),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int",
          "group_size": 32, "symmetric": True}}}, "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
          "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]}, "int4", 0.5625,
         {"attention": 1.0, "shared": 1.0, "dense": 1.0}),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head", 7]}, "fp4", 0.5625, {}),
        ({"quant_method": 7, "config_groups": [1], "group_size": -3, "ignore": "x"}, "int8", 1, {}),
        ({"quant_method": "awq", "bits": 4, "group_size": 10**30}, "", 0, {}),
    ],
)  # fmt: skip
def test_how_checkpoints_are_quantized(said: dict[str, Any], dtype: str, width: float, kept: dict[str, float]) -> None:
    config = Config({**PLAIN, "quantization_config": said})
    if not dtype:
        with pytest.raises(Exception, match="group_size"):
            quantization(config)
        return
    found = quantization(config)
    always = dict.fromkeys(("embeddings", "head", "router", "media"), 1.0)
    assert (found.dtype, found.width, found.kept) == (dtype, width, always | kept)


def test_no_pattern_of_a_config_is_executed() -> None:
    """A regular expression that never ends is only looked at for words."""
    hostile = ["re:(a+)+$" + "a" * 10_000_000] * 3
    config = Config({**PLAIN, "quantization_config": {"quant_method": "fp8", "ignore": hostile}})
    assert quantization(config).dtype == "fp8"


def test_the_bytes_of_a_quantized_checkpoint() -> None:
    config = Config({**PLAIN, "quantization_config": {"quant_method": "fp8"}})
    weights = count(config)
    rest = sum(weights.values()) - 2 * 100 * 1024
    assert quantization(config).stored(weights) == rest + 2 * 2 * 100 * 1024


def test_a_mixture_counts_all_experts() -> None:
    moe = {**PLAIN, "model_type": "qwen3_moe", "num_experts": 16, "moe_intermediate_size": 32,
           "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]}  # fmt: skip
    weights = count(Config(moe))
    assert weights["experts"] == 7 * 16 * 3 * 1024 * 32
    assert weights["shared"] == 7 * 3 * 1024 * 48
    assert weights["router"] == 7 * 16 * 1024
    assert weights["dense"] == 3 * 1024 * 64


def test_layers_that_are_counted_by_their_list_and_experts_in_a_latent_space() -> None:
    """Nemotron 3: a layer is Mamba, attention, or experts, which work on `moe_latent_size` values."""
    config = {name: value for name, value in PLAIN.items() if name != "num_hidden_layers"}
    blocks = ["mamba", "moe", "attention", "moe", "mlp"]
    moe = {"model_type": "nemotron_h", "layers_block_type": blocks, "n_routed_experts": 4, "moe_intermediate_size": 32,
           "moe_latent_size": 256, "moe_shared_expert_intermediate_size": 48}  # fmt: skip
    read = Config(config | moe)
    weights = count(read)
    assert read.layers() == 5
    assert weights["experts"] == 2 * 4 * 2 * 256 * 32
    assert weights["shared"] == 2 * (2 * 1024 * 48 + 2 * 1024 * 256)
    assert weights["dense"] == 2 * 1024 * 64
    assert cache(read).uncached == 4


def test_a_layer_of_state_space_or_attention_may_have_a_feed_forward_network_too() -> None:
    weights = count(Config({**PLAIN, "layers_block_type": ["mamba", "attention"] * 4}))
    assert weights["dense"] == 8 * 3 * 1024 * 64


def test_a_checkpoint_of_several_precisions_needs_the_narrowest() -> None:
    layers = {"a": {"quant_algo": "MXFP8"}, "b": {"quant_algo": "NVFP4"}, "c": 7}
    said = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    assert quantization(Config({**PLAIN, "quantization_config": said})).dtype == "fp4"
