"""GGUF files of the small pooling models, with the weights of their Hugging Face directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf

from tests.unit.engines.pooling_models import CONFIGS

_EMBEDDINGS = {
    "word_embeddings": "token_embd",
    "position_embeddings": "position_embd",
    "token_type_embeddings": "token_types",
    "LayerNorm": "token_embd_norm",
}
_LAYER = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_HEADS = {
    "bert.pooler.dense": "cls",
    "classifier.dense": "cls",
    "classifier.out_proj": "cls.output",
    "classifier": "cls.output",
}


def write_gguf(directory: Path, name: str, pooling: gguf.PoolingType) -> Path:
    """Write `model.gguf` into the directory that `write_model` has made of this model."""
    from safetensors.numpy import load_file

    config, file = CONFIGS[name], directory / "model.gguf"
    is_roberta = config["model_type"] == "xlm-roberta"
    first = 2 if is_roberta else 0  # RoBERTa's positions begin after the padding id
    writer = gguf.GGUFWriter(file, "bert")
    writer.add_context_length(config["max_position_embeddings"] - first)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config.get("layer_norm_eps", 1e-12))
    writer.add_causal_attention(False)
    writer.add_pooling_type(pooling)
    writer.add_file_type(0)
    _write_tokenizer(writer, json.loads((directory / "tokenizer.json").read_text()), is_roberta)
    for key, value in load_file(str(directory / "model.safetensors")).items():
        if (found := _name(key)) is not None:
            writer.add_tensor(found, value[first:] if "position_embeddings" in key else value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], is_roberta: bool) -> None:
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_type_count(1 if is_roberta else 2)
    writer.add_token_list([token if token.startswith("[") else f"▁{token}" for token in vocabulary])
    writer.add_token_types([3 if token.startswith("[") else 1 for token in vocabulary])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(3)
    writer.add_sep_token_id(3)
    writer.add_unk_token_id(vocabulary.index("[UNK]"))
    writer.add_pad_token_id(vocabulary.index("[PAD]"))
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)


def _name(key: str) -> str | None:
    """Return llama.cpp's name of a tensor, or None if it has none."""
    stem, _, kind = key.rpartition(".")
    for prefix, own in _HEADS.items():
        if stem == prefix:
            return f"{own}.{kind}"
    stem = stem.removeprefix("bert.").removeprefix("roberta.")
    if stem.startswith("embeddings."):
        return f"{_EMBEDDINGS[stem.removeprefix('embeddings.')]}.{kind}"
    if stem.startswith("encoder.layer."):
        number, _, part = stem.removeprefix("encoder.layer.").partition(".")
        return f"blk.{number}.{_LAYER[part]}.{kind}"
    return None
