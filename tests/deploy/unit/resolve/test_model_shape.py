"""A model's shape out of its files, and what its layers keep of a request."""

from __future__ import annotations

import contextlib
import json
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from deploy.data import table
from deploy.errors import SpecError
from deploy.resolve.fit import CHUNK, Need
from deploy.resolve.model.files import Config
from deploy.resolve.model.quantization import quantization
from deploy.resolve.model.shape import config_of, shape_from_table, shape_in_directory, shape_of_config
from deploy.resolve.model.weights import Cache, LayerKind, cache, count, kinds
from deploy.spec.sections import Shape
from tests.deploy.cases import LLAMA_CONFIG
from tests.deploy.unit.resolve.cards import CARDS
from tests.one_test import in_one_test

# -- a model's shape out of config.json, of files here and in S3, of GGUF, and the table of known ones -----------------


_LLAMA_BYTES = 16_060_522_496  # of the index of Meta-Llama-3-8B


def test_llama_by_its_config_alone() -> None:
    shape = shape_of_config(LLAMA_CONFIG)
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.heads, shape.context) == (32, 8, 128, 32, 8192)
    assert shape.parameters == pytest.approx(8_030_261_248, rel=1e-4)  # but for norms
    assert shape.embeddings == 2 * 128256 * 4096
    assert (shape.dtype, shape.stored) == ("bf16", None)


def test_the_checkpoints_bytes_tell_it_exactly() -> None:
    shape = shape_of_config(LLAMA_CONFIG, _LLAMA_BYTES)
    assert (shape.parameters, shape.stored) == (8_030_261_248, _LLAMA_BYTES)


@in_one_test("row", table("models")["models"], ids=lambda row: str(row["names"][0]))
def test_the_known_models_dimensions_make_their_number_of_weights(row: dict[str, Any]) -> None:
    config = config_of(row, table("models")["models"])
    counted = shape_of_config(config).parameters
    multimodal = row["names"][0].startswith("google/gemma-3-") and "1b" not in row["names"][0]
    vision = 420e6 if multimodal else 0.0  # its tower is in no text config
    # What brings images into the model is only estimated: its part of a small model is large.
    relative, absolute = (0.02, 110e6) if "vision_config" in config else (1e-3, 0.0)
    assert counted + vision == pytest.approx(row["parameters"], rel=relative, abs=absolute)


def test_known_models_are_found_by_any_case() -> None:
    found = shape_from_table("META-llama/llama-3.3-70b-INSTRUCT")
    assert found is not None
    assert (found.parameters, found.layers, found.kv_heads, found.context) == (70_553_706_496, 80, 8, 131072)
    assert shape_from_table("me/mine") is None


def test_no_name_stands_twice_in_the_table() -> None:
    names = [name.lower() for row in table("models")["models"] for name in row["names"]]
    assert len(names) == len(set(names)) > 80


@in_one_test(
    ("config", "layers", "kv_heads", "head_dim", "billions"),
    [
        ({"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12,
          "tie_word_embeddings": True}, 12, 12, 64, 0.124),
        ({"model_type": "gpt_bigcode", "vocab_size": 49152, "n_embd": 6144, "n_layer": 40, "n_head": 48,
          "n_inner": 24576, "multi_query": True, "tie_word_embeddings": True}, 40, 1, 128, 15.5),
        ({"model_type": "gpt_neox", "vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44,
          "num_attention_heads": 64, "intermediate_size": 24576}, 44, 64, 96, 20.55),
        ({"model_type": "falcon", "vocab_size": 65024, "hidden_size": 8192, "num_hidden_layers": 60,
          "num_attention_heads": 128, "num_kv_heads": 8, "tie_word_embeddings": True}, 60, 8, 64, 41.3),
        ({"model_type": "opt", "vocab_size": 50272, "hidden_size": 4096, "ffn_dim": 16384, "num_hidden_layers": 32,
          "num_attention_heads": 32, "tie_word_embeddings": True}, 32, 32, 128, 6.65),
        ({"model_type": "chatglm", "padded_vocab_size": 65024, "hidden_size": 4096, "ffn_hidden_size": 13696,
          "intermediate_size": 13696, "num_layers": 28, "num_attention_heads": 32, "kv_channels": 128,
          "multi_query_group_num": 2}, 28, 2, 128, 6.24),
        ({"model_type": "qwen2_moe", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24,
          "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 5632, "num_experts": 60,
          "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}, 24, 16, 128, 14.3),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_names_of_other_models(
    config: dict[str, Any], layers: int, kv_heads: int, head_dim: int, billions: float
) -> None:
    shape = shape_of_config(config)
    assert (shape.layers, shape.kv_heads, shape.head_dim) == (layers, kv_heads, head_dim)
    assert shape.parameters == pytest.approx(billions * 1e9, rel=0.01)


def test_of_a_multimodal_model_the_text_counts_with_the_wholes_precision() -> None:
    whole = {"model_type": "gemma3", "torch_dtype": "float16", "text_config": LLAMA_CONFIG | {"torch_dtype": "float16"}}
    assert shape_of_config(whole, 18_000_000_000).model_dump() == {
        **shape_of_config(LLAMA_CONFIG, 18_000_000_000).model_dump(),
        "dtype": "fp16",
    }


def test_latent_attention_keeps_one_vector_a_token() -> None:
    deepseek = {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "quantization_config": {"quant_method": "fp8"},
    }  # fmt: skip
    shape = shape_of_config(deepseek, 688_586_727_753)
    assert 2 * shape.kv_heads * shape.head_dim == 576
    assert shape.dtype == "fp8"
    assert shape.parameters == pytest.approx(687e9, rel=0.01)  # the files' size: these dimensions make a twelfth of it


def compressed(bits: int, kind: str) -> dict[str, Any]:
    """llm-compressor's."""
    return {"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": {"num_bits": bits, "type": kind}}}}


@in_one_test(
    ("quantization", "dtype"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        (compressed(8, "float"), "fp8"),
        (compressed(4, "int"), "int4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "fp4"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "int4"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)  # fmt: skip
def test_quantized_checkpoints_say_their_precision(quantization: dict[str, Any], dtype: str) -> None:
    shape = shape_of_config(LLAMA_CONFIG | {"quantization_config": quantization}, 9_000_000_000)
    assert shape.dtype == dtype
    assert shape.parameters == pytest.approx(8_030_261_248, rel=1e-4)  # of its dimensions, not of its bytes
    assert shape.stored == 9_000_000_000


def test_what_a_config_lacks_is_named() -> None:
    with pytest.raises(SpecError, match=r"config\.json has no num_hidden_layers"):
        shape_of_config({key: value for key, value in LLAMA_CONFIG.items() if key != "num_hidden_layers"})


def test_a_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"0" * 1000)
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"0" * 600)
    (tmp_path / "consolidated.safetensors").write_bytes(b"0" * 1600)
    (tmp_path / "pytorch_model.bin").write_bytes(b"0" * 1600)
    shape = shape_in_directory(tmp_path)
    assert shape is not None
    assert (shape.stored, shape.parameters) == (1600, 800)
    index = {"metadata": {"total_size": 7}, "weight_map": {"a": "model-00002-of-00002.safetensors", "b": "gone"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    shape = shape_in_directory(tmp_path)
    assert shape is not None
    assert shape.stored == 600  # of the files that the index names; its total is not believed


def test_modelopts_own_file_says_the_precision(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    shape = shape_in_directory(tmp_path)
    assert shape is not None
    assert shape.dtype == "fp8"


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    assert shape_in_directory(tmp_path) is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", r"the model's config\.json is not JSON: "),
        ("", r"the model's config\.json is not JSON: "),
        ("[1]", r"the model's config\.json is not a JSON object"),
        ("[" * 100_000, r"the model's config\.json is nested too deep"),
        (json.dumps(LLAMA_CONFIG | {"num_hidden_layers": -3}), "num_hidden_layers: -3 is not a whole number from 0 to"),
        (json.dumps(LLAMA_CONFIG | {"num_hidden_layers": 10**9}), "layers: 1000000000 is not a whole number"),
        (json.dumps(LLAMA_CONFIG | {"hidden_size": 10**400}), "hidden_size: 10{39}… is not a whole number"),
        (json.dumps(LLAMA_CONFIG | {"hidden_size": 1e300}), r"hidden_size: 1\d{39}… is not a whole number"),
        (json.dumps(LLAMA_CONFIG | {"hidden_size": float("nan")}), "hidden_size: nan is not a whole number"),
        (json.dumps(LLAMA_CONFIG | {"hidden_size": {"a": 1}}), "hidden_size: {'a': 1} is not a whole number"),
        (json.dumps(LLAMA_CONFIG | {"vocab_size": "many" * 100}), "vocab_size: 'many.{35}… is not a whole number"),
        (json.dumps(LLAMA_CONFIG | {"num_key_value_heads": True}), "num_key_value_heads: True is not a whole number"),
        (json.dumps(LLAMA_CONFIG | {"num_key_value_heads": [[8]]}), r"heads: \[\[8\]\] is not a whole number"),
    ],
    ids=lambda value: value[:30],
)  # fmt: skip
def test_a_config_that_cannot_be(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(SpecError, match=said) as caught:
        shape_in_directory(tmp_path)
    assert len(str(caught.value)) < 300


def test_a_config_of_many_megabytes_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(100_000_000)
    with pytest.raises(SpecError, match=r"config\.json has 100 MB, but at most 17 MB are supported"):
        shape_in_directory(tmp_path)


def gguf(version: int = 3, **changes: Any) -> bytes:
    """A small head: two tensors, of 12 and of 40 weights."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    said: dict[str, Any] = {
        "general.architecture": "llama",
        "tokenizer.ggml.tokens": ["a", "bc"],
        "llama.block_count": 30,
        "llama.embedding_length": 576,
        "llama.attention.head_count": 9,
        "llama.attention.head_count_kv": 3,
        "llama.context_length": 8192,
        **changes,
    }
    found = b"GGUF" + struct.pack("<IQQ", version, 2, len(said))
    for key, value in said.items():
        found += text(key)
        if isinstance(value, str):
            found += struct.pack("<I", 8) + text(value)
        elif isinstance(value, list) and isinstance(value[0], str):
            found += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        elif isinstance(value, list):
            found += struct.pack(f"<IIQ{len(value)}I", 9, 4, len(value), *value)
        else:
            found += struct.pack("<II", 4, value)
    for name, sizes in (("a", (3, 4)), ("b", (40,))):
        found += text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, 0, 0)
    return found


def test_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(gguf() + b"0" * 100)
    shape = shape_in_directory(tmp_path)
    assert shape is not None
    assert (shape.parameters, shape.layers, shape.kv_heads, shape.head_dim, shape.heads) == (52, 30, 3, 64, 9)
    assert (shape.context, shape.stored) == (8192, (tmp_path / "model.gguf").stat().st_size)


def test_a_gguf_file_with_heads_layer_by_layer(tmp_path: Path) -> None:
    heads: Any = {"llama.attention.head_count_kv": [1, 3]}
    (tmp_path / "model.gguf").write_bytes(gguf(**heads))
    shape = shape_in_directory(tmp_path)
    assert shape is not None
    assert shape.kv_heads == 3


def test_what_a_gguf_file_says_of_its_precision_and_attention(tmp_path: Path) -> None:
    said: Any = {
        "general.architecture": "gemma3",
        **{f"gemma3.{name}": value for name, value in {
            "block_count": 30, "embedding_length": 576, "attention.head_count": 9, "attention.key_length": 256,
            "attention.head_count_kv": [0, 3] * 15, "attention.sliding_window": 512,
            "attention.sliding_window_pattern": [0, 1] * 15, "context_length": 8192}.items()},
    }  # fmt: skip
    (tmp_path / "model.gguf").write_bytes(gguf(**said))
    shape = shape_in_directory(tmp_path)
    assert shape is not None
    assert (shape.kv_heads, shape.head_dim, shape.uncached_layers) == (3, 256, 15)
    assert (shape.window_layers, shape.window, shape.dtype) == (15, 512, "fp32")  # the type of its tensors is 0


def test_latent_attention_of_a_gguf_file(tmp_path: Path) -> None:
    said: Any = {"llama.attention.kv_lora_rank": 512, "llama.rope.dimension_count": 64}
    (tmp_path / "model.gguf").write_bytes(gguf(**said))
    shape = shape_in_directory(tmp_path)
    assert shape is not None
    assert 2 * shape.kv_heads * shape.head_dim == 576


def test_a_gguf_model_in_parts(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        (tmp_path / f"big-{number:05}-of-00003.gguf").write_bytes(gguf() + b"0" * number)
    (tmp_path / "zother.gguf").write_bytes(gguf())
    shape = shape_in_directory(tmp_path)
    assert shape is not None
    assert (shape.parameters, shape.stored) == (3 * 52, 3 * len(gguf()) + 6)


NINE: Any = {"llama.attention.head_count": "nine"}
NOBODYS: Any = {"general.architecture": "none"}


def nested() -> bytes:
    """A list of lists of lists …"""
    text = b"general.name"
    found = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(text)) + text + struct.pack("<I", 9)
    return found + struct.pack("<IQ", 9, 1) * 100_000


def long_list(kind: int) -> bytes:
    text = b"general.name"
    found = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(text)) + text + struct.pack("<I", 9)
    return found + struct.pack("<IQ", kind, 1 << 60) + bytes(100)


@pytest.mark.parametrize(
    "content",
    [
        nested(),
        long_list(8),
        long_list(4),
        gguf(**{"llama.block_count": 1 << 31}),
        gguf(**{"llama.attention.head_count": 0}),
        gguf(3, **NINE),
        gguf(3, **NOBODYS),
    ],
    ids=range(7),
)
def test_gguf_files_that_lie(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(SpecError, match="gguf") as caught:
        shape_in_directory(tmp_path)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("content", [gguf()[:60], gguf()[:-40], b"", b"GGML" + gguf()[4:], gguf(version=1)])
def test_files_that_are_no_gguf(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(SpecError, match=r"GGUF|gguf"):
        shape_in_directory(tmp_path)


# -- what layers keep of a request, by the kind of their attention, and what that makes of a cache ---------------------


GIB = 1 << 30
PLAIN = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 8,
         "vocab_size": 100, "intermediate_size": 64}  # fmt: skip


@in_one_test(
    ("config", "expected"),
    [
        ({}, {LayerKind.FULL: 8}),
        ({"layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window": 4},
         {LayerKind.WINDOW: 4, LayerKind.FULL: 4}),
        ({"layer_types": ["linear_attention"] * 6 + ["attention", "odd"]}, {LayerKind.LINEAR: 6, LayerKind.FULL: 2}),
        ({"layer_types": ["mamba"] * 3}, {LayerKind.MAMBA: 3, LayerKind.FULL: 5}),  # the list is too short
        ({"layer_types": ["mamba"] * 30}, {LayerKind.MAMBA: 8}),
        ({"layer_types": "all"}, {LayerKind.FULL: 8}),
        ({"layers_block_type": ["mamba", "attention"] * 4}, {LayerKind.MAMBA: 4, LayerKind.FULL: 4}),
        ({"hybrid_override_pattern": "MEM*-EM*"}, {LayerKind.MAMBA: 3, LayerKind.NONE: 3, LayerKind.FULL: 2}),
        ({"model_type": "gemma2", "sliding_window": 4096}, {LayerKind.WINDOW: 4, LayerKind.FULL: 4}),
        ({"model_type": "gemma3_text", "sliding_window": 512}, {LayerKind.WINDOW: 7, LayerKind.FULL: 1}),
        ({"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 2},
         {LayerKind.WINDOW: 4, LayerKind.FULL: 4}),
        ({"model_type": "gpt_oss", "sliding_window": 128}, {LayerKind.WINDOW: 4, LayerKind.FULL: 4}),
        ({"model_type": "mistral", "sliding_window": 4096}, {LayerKind.WINDOW: 8}),
        ({"model_type": "mistral", "sliding_window": None}, {LayerKind.FULL: 8}),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, {LayerKind.FULL: 8}),
        ({"model_type": "new", "sliding_window": 4096}, {LayerKind.FULL: 8}),  # which layers have it is not said
        ({"model_type": "qwen3_next"}, {LayerKind.LINEAR: 6, LayerKind.FULL: 2}),
        ({"model_type": "llama4_text", "attention_chunk_size": 8192}, {LayerKind.WINDOW: 6, LayerKind.FULL: 2}),
        ({"model_type": "llama4_text", "attention_chunk_size": 8192, "no_rope_layers": [1, 0] * 4},
         {LayerKind.WINDOW: 4, LayerKind.FULL: 4}),
        ({"hybrid_layer_pattern": [0, 1] * 4, "sliding_window": 128}, {LayerKind.WINDOW: 4, LayerKind.FULL: 4}),
        ({"attn_type_list": [0, 0, 0, 1] * 2}, {LayerKind.LINEAR: 6, LayerKind.FULL: 2}),
        ({"linear_attn_config": {"full_attn_layers": [4, 8], "num_heads": 8, "head_dim": 16}},
         {LayerKind.LINEAR: 6, LayerKind.FULL: 2}),
    ],
)  # fmt: skip
def test_kinds_of_layers(config: dict[str, Any], expected: dict[LayerKind, int]) -> None:
    assert Counter(kinds(Config({**PLAIN, **config}))) == expected


@in_one_test(
    ("name", "expected"),
    [
        ("openai/gpt-oss-20b", Cache(8, 64, window_layers=12, window=128)),
        ("meta-llama/Llama-4-Scout-17B-16E", Cache(8, 128, window_layers=36, window=8192)),
        ("google/gemma-4-31B-it",
         Cache(4, 512, window_layers=50, window=1024, window_kv_heads=16, window_head_dim=256)),
        ("deepseek-ai/DeepSeek-V3.1", Cache(1, 288)),
        # and the indexer's keys: 128 bytes, and a scale of 4
        ("deepseek-ai/DeepSeek-V3.2", Cache(1, 288, extra=61 * 132 / 2)),
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
    shape = shape_from_table(name)
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
            shape.extra_values,
        )
        == expected
    )


@in_one_test("name", list(CARDS))
def test_the_cards_of_2026_by_hand(name: str) -> None:
    card = CARDS[name]
    shape = shape_of_config(card.config)
    need = Need(shape, context=1 << 20, windows=True)
    full = (need.kv_gib(1 << 20, 1) - need.kv_gib((1 << 20) - 1024, 1)) * GIB / 1024
    early = (need.kv_gib(64, 1) - need.kv_gib(0, 1)) * GIB / 64
    assert full == pytest.approx(card.per_token, rel=1e-9)
    assert early - full == pytest.approx(card.per_window, abs=1)
    assert shape.state == pytest.approx(card.state)
    assert shape.parameters / 1e9 == pytest.approx(card.billions, rel=0.03)


@in_one_test(
    ("config", "expected"),
    [
        ({"num_key_value_heads": [1, 1, 2, 2, 4, 4, 8, 8]}, 2 * (1 + 1 + 2 + 2 + 4 + 4 + 8 + 8) * 128 * 2),
        ({"num_key_value_heads": [2] * 8}, 2 * 8 * 2 * 128 * 2),
        ({"num_key_value_heads": [0, 4] * 4}, 2 * 8 * 4 * 128 * 2),  # a 0 is no number of heads
        ({"num_key_value_heads": 0}, 2 * 8 * 8 * 128 * 2),
        ({"num_key_value_heads": None, "num_kv_heads": 4}, 2 * 8 * 4 * 128 * 2),
        ({"head_dim": 0}, 2 * 8 * 2 * 128 * 2),
        ({"layer_group_size": 3, "model_type": "bailing_hybrid"}, 2 * 2 * 2 * 128 * 2),
        ({"layer_group_size": 3, "model_type": "bailing_moe_linear"}, 2 * 4 * 2 * 128 * 2),  # and a group of two
        ({"sliding_window": 16, "sliding_window_pattern": "LG"}, 2 * 4 * 2 * 128 * 2),
        ({"sliding_window": 16, "sliding_window_pattern": "GLL"}, 2 * 4 * 2 * 128 * 2),  # the last layer is global
        ({"sliding_window": 16, "sliding_window_pattern": "L"}, 2 * 1 * 2 * 128 * 2),
        ({"sliding_window": 16, "sliding_window_pattern": ""}, 2 * 8 * 2 * 128 * 2),
        ({"sliding_window": 16, "sliding_window_pattern": 0}, 2 * 8 * 2 * 128 * 2),
        ({"sliding_window": 0, "sliding_window_pattern": "LG"}, 2 * 8 * 2 * 128 * 2),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 0}, 2 * 8 * 512),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 0}, 2 * 8 * 576),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_n_heads": 4,
          "index_topk_pattern": "FSSSFSSS"}, 2 * 8 * 576 + 2 * 132),
        ({"compress_ratios": [0] * 8, "o_lora_rank": 4, "head_dim": 512, "sliding_window": 8}, 0),
        ({"compress_ratios": [4] * 8, "o_lora_rank": 4, "head_dim": 512, "sliding_window": 8}, 2 * 8 * 512 / 4),
        ({"layer_types": ["compressed_sparse_attention"] * 8, "compress_rates": {"compressed_sparse_attention": 8},
          "o_lora_rank": 4, "head_dim": 512, "sliding_window": 8}, 2 * 8 * 512 / 8),
        ({"block_configs": [{"attention": {"n_heads_in_group": 8}}, {"attention": {"no_op": True}},
                            {"attention": {"replace_with_linear": True}}, {"attention": {"n_heads_in_group": 2}}] * 2},
         2 * 2 * (1 + 4) * 128 * 2),
        ({"block_configs": [{}] * 8, "num_key_value_heads": 2}, 2 * 8 * 2 * 128 * 2),
        ({"layer_types": None, "hybrid_override_pattern": None}, 2 * 8 * 2 * 128 * 2),
    ],
)  # fmt: skip
def test_a_zero_a_null_a_list_and_letters(config: dict[str, Any], expected: float) -> None:
    need = Need(shape_of_config({**PLAIN, **config}), context=100_000, windows=True)
    a_token = (need.kv_gib(100_000, 1) - need.kv_gib(99_000, 1)) * GIB / 1000
    assert a_token == pytest.approx(expected)


@pytest.mark.parametrize("field", ["compress_ratios", "block_configs", "sparse_attention_config", "layer_group_size"])
@pytest.mark.parametrize("value", ["x", [[]], [{}], [-1], -1, {"sparse_attention_freq": [None]}, 0, None, []])
def test_what_layers_keep_is_an_error_or_a_number(field: str, value: object) -> None:
    with contextlib.suppress(SpecError):
        assert shape_of_config({**PLAIN, field: value}).parameters > 0


def test_experts_of_four_bits_in_a_checkpoint_of_eight(tmp_path: Path) -> None:
    """DeepSeek-V4's: two weights in a byte of its experts alone."""
    config = CARDS["deepseek-ai/DeepSeek-V4-Flash"].config
    stored = shape_of_config(config).stored
    assert stored is not None
    assert stored / GIB == pytest.approx(148.7, rel=0.01)  # as published
    header = {
        "layers.0.ffn.experts.0.w1.weight": {"dtype": "I8", "shape": [8, 16], "data_offsets": [0, 128]},
        "layers.0.ffn.experts.0.w1.scale": {"dtype": "F8_E8M0", "shape": [8, 1], "data_offsets": [128, 136]},
        "layers.0.attn.wkv.weight": {"dtype": "F8_E4M3", "shape": [8, 8], "data_offsets": [136, 200]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(200))
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = shape_in_directory(tmp_path)
    assert shape is not None
    assert (shape.parameters, shape.stored) == (256 + 64, 200)


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
    assert (found.dtype, found.width, found.unquantized) == (dtype, width, always | kept)


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


def test_layers_are_counted_by_their_list_and_experts_in_a_latent_space() -> None:
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


def test_a_state_space_or_attention_layer_may_have_a_feed_forward_network() -> None:
    weights = count(Config({**PLAIN, "layers_block_type": ["mamba", "attention"] * 4}))
    assert weights["dense"] == 8 * 3 * 1024 * 64


def test_a_checkpoint_of_several_precisions_needs_the_narrowest() -> None:
    layers = {"a": {"quant_algo": "MXFP8"}, "b": {"quant_algo": "NVFP4"}, "c": 7}
    said = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    assert quantization(Config({**PLAIN, "quantization_config": said})).dtype == "fp4"
