"""Find a model's size and shape: in its files, on this machine or in S3, or in the table of well-known models.

Memory depends on the number of weights, their precision, and the attention's layers, KV heads and head size. All are in
config.json, under transformers' names; file sizes tell the rest. Known are dense models (Llama, Qwen, Mistral, Gemma,
Phi, GPT-2, GPT-NeoX, Falcon, OPT, BLOOM, MPT, ChatGLM), mixtures of experts (all experts are in memory, so all count)
and latent attention (DeepSeek: one compressed vector a token instead of K and V).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.data import table
from deploy.errors import SpecError
from deploy.resolve.gguf_header import gguf_shape
from deploy.s3.uri import bucket_and_key
from deploy.spec.sections import Shape
from deploy.spec.values import Precision

if TYPE_CHECKING:
    from deploy.aws import Aws

Read = Callable[[str], "bytes | None"]
"""Read a file of a model's directory by its name; None: there is no such file."""

WIDTH: Mapping[str, float] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "fp4": 0.5625, "int4": 0.5625}
"""Bytes of one weight, scales included (4 bits: an 8-bit scale for every 16, as in NVFP4)."""

_CHECKPOINT: Mapping[str, Precision] = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8",
}
_TWO_MATRICES = ("gpt2", "gpt_bigcode", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2", "mpt")
_GGUF_HEAD = 32 << 20


def known_model(name: str) -> Shape | None:
    """Return the shape of a hub's model from the table; None: unknown."""
    for row in table("models")["models"]:
        if name.lower() in (item.lower() for item in row["names"]):
            return shape_of_config(row["config"]).model_copy(update={"parameters": float(row["parameters"])})
    return None


def shape_in_directory(directory: Path) -> Shape | None:
    """Read the shape from a Hugging Face directory, or from a .gguf file in it; None: it has neither.

    Raises:
        SpecError: the files are invalid.
    """
    sizes = {item.name: item.stat().st_size for item in directory.iterdir() if item.is_file()}
    if "config.json" not in sizes and (gguf := next((name for name in sorted(sizes) if name.endswith(".gguf")), None)):
        with (directory / gguf).open("rb") as file:
            return gguf_shape(file.read(_GGUF_HEAD), sizes[gguf])
    return read_shape(lambda name: (directory / name).read_bytes() if name in sizes else None, sizes)


def shape_in_s3(aws: Aws, prefix: str) -> Shape | None:
    """Read the shape of a model under `s3://bucket/prefix/`, with ListObjectsV2 and GetObject."""
    bucket, path = bucket_and_key(prefix)
    s3 = aws.client("s3")
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=path, Delimiter="/")
    sizes = {item["Key"].removeprefix(path): item["Size"] for page in pages for item in page.get("Contents", ())}

    def read(name: str) -> bytes | None:
        if name not in sizes:
            return None
        return bytes(s3.get_object(Bucket=bucket, Key=path + name)["Body"].read())

    return read_shape(read, sizes)


def read_shape(read: Read, sizes: Mapping[str, int]) -> Shape | None:
    """Read the shape from a directory's files; None: there is no config.json of a language model.

    Args:
        sizes: bytes of all files, by name.

    Raises:
        SpecError: config.json is no JSON, or lacks something.
    """
    config = _json(read, "config.json")
    if config is None:
        return None
    if (quantized := _json(read, "hf_quant_config.json")) is not None:  # ModelOpt's
        config = {**config, "quantization_config": {"quant_method": "modelopt", **quantized.get("quantization", {})}}
    index = _json(read, "model.safetensors.index.json") or {}
    total = index.get("metadata", {}).get("total_size")
    return shape_of_config(config, int(total) if total else _weight_bytes(sizes))


def shape_of_config(config: Mapping[str, Any], stored: int | None = None) -> Shape:
    """Compute the shape from a config.json.

    Args:
        config: its content; of a multimodal model the text part counts, with the whole's precision.
        stored: bytes of the checkpoint's weights; None: unknown.

    Raises:
        SpecError: it lacks something.
    """
    text = {**config, **next((config[key] for key in ("text_config", "llm_config") if key in config), {})}
    try:
        hidden = _first(text, "hidden_size", "n_embd", "d_model")
        heads = _first(text, "num_attention_heads", "n_head", "n_heads")
        layers = _first(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
        kv_heads, head_dim = _attention(text, hidden, heads)
        vocabulary = _first(text, "vocab_size", "padded_vocab_size")
    except KeyError as error:
        raise SpecError(f"config.json has no {error.args[0]}", "Say model.shape in the specification.") from None
    tied = bool(text.get("tie_word_embeddings", False))
    precision = _precision(text)
    embeddings = vocabulary * hidden * (1 if tied else 2)
    if stored and WIDTH[precision] >= 2 and not _quantized(text):
        parameters = stored / WIDTH[precision]
    elif "kv_lora_rank" in text:
        parameters = _of_quantized(stored, WIDTH[precision], embeddings)
    else:
        parameters = float(embeddings + layers * _layer(text, hidden, heads, kv_heads, head_dim))
    return Shape(
        parameters=parameters,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        heads=heads,
        context=text.get("max_position_embeddings") or text.get("n_positions"),
        embeddings=embeddings,
        dtype=precision,
        stored=stored,
    )


def _attention(text: Mapping[str, Any], hidden: int, heads: int) -> tuple[int, int]:
    """Return the number of KV heads, and the head size."""
    if "kv_lora_rank" in text:  # latent attention has one vector for K and V together, on every GPU
        return 1, (text["kv_lora_rank"] + text["qk_rope_head_dim"] + 1) // 2
    head_dim = text.get("head_dim") or text.get("kv_channels") or hidden // heads
    for key in ("num_key_value_heads", "num_kv_heads", "multi_query_group_num"):
        if text.get(key):
            return int(text[key]), int(head_dim)
    return (1 if text.get("multi_query") else heads), int(head_dim)


def _layer(text: Mapping[str, Any], hidden: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Return the weights of a layer. Norms and biases are left out: less than a thousandth."""
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    wide = text.get("intermediate_size") or text.get("ffn_dim") or text.get("n_inner") or 4 * hidden
    matrices = 2 if text.get("model_type") in _TWO_MATRICES else 3
    experts = next((text[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if key in text), 0)
    if not experts:
        return int(attention + matrices * hidden * wide)
    of_expert = text.get("moe_intermediate_size") or wide
    shared = text.get("shared_expert_intermediate_size") or of_expert * (text.get("n_shared_experts") or 0)
    return int(attention + hidden * experts + matrices * hidden * (of_expert * experts + shared))


def _precision(text: Mapping[str, Any]) -> Precision:
    """Return the precision of the checkpoint's weights."""
    quantized = _quantized(text)
    method = str(quantized.get("quant_method", "")) + str(quantized.get("quant_algo", ""))
    groups = quantized.get("config_groups") or {}
    weights = next((item.get("weights") or {} for item in groups.values()), {})  # compressed-tensors
    bits = weights.get("num_bits") or quantized.get("bits") or quantized.get("w_bit")
    floating = weights.get("type") == "float" or "fp" in method.lower()
    if quantized:
        if bits == 4 or quantized.get("load_in_4bit") or any(word in method.lower() for word in ("fp4", "w4", "int4")):
            return "fp4" if floating else "int4"
        return "fp8" if floating else "int8"
    return _CHECKPOINT.get(str(text.get("torch_dtype") or text.get("dtype") or "bfloat16"), "bf16")


def _quantized(text: Mapping[str, Any]) -> Mapping[str, Any]:
    return text.get("quantization_config") or {}


def _of_quantized(stored: int | None, width: float, embeddings: int) -> float:
    if not stored:
        raise SpecError(
            "config.json alone does not tell how many weights a model with latent attention has",
            "Give its directory with the safetensors files, or say model.shape.",
        )
    return max(0.0, stored - 2 * embeddings) / width + embeddings


def _weight_bytes(sizes: Mapping[str, int]) -> int | None:
    """Return the bytes of the weight files to load: safetensors before .bin, no `consolidated` copy beside shards."""
    for ending in (".safetensors", ".bin"):
        files = {name: size for name, size in sizes.items() if name.endswith(ending) and name != "training_args.bin"}
        sharded = {name: size for name, size in files.items() if not name.startswith("consolidated")}
        if files:
            return sum((sharded or files).values())
    return None


def _json(read: Read, name: str) -> dict[str, Any] | None:
    content = read(name)
    if content is None:
        return None
    try:
        value = json.loads(content)
    except ValueError as error:
        raise SpecError(f"the model's {name} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise SpecError(f"the model's {name} is no JSON object")
    return value


def _first(text: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if text.get(name):
            return int(text[name])
    raise KeyError(names[0])
