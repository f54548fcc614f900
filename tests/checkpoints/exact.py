"""Checkpoints whose logits are known: the same at each position, whatever the prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from handler.engines.openvino.decoder.config import read_decoder
from handler.engines.openvino.decoder.convert import shapes
from tests.checkpoints.decoders import write_safetensors

EOS = "</s>"
_SPECIAL = ("<unk>", "<s>", EOS, "<pad>")
_VOCABULARY, _SIZE = 320, 64  # with one head: attention on CPUs has no heads of fewer than 32 dimensions
_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": _VOCABULARY,
    "hidden_size": _SIZE,
    "intermediate_size": _SIZE,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-9,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_model(directory: Path, logits: Mapping[str, float], default: float) -> Path:
    """Write a checkpoint with a tokenizer of single bytes.

    The only layer adds nothing. The final norm makes the square root of the size of the first dimension, so the output
    matrix holds the logits divided by it.

    Args:
        logits: by a token's text.
        default: logit of all other tokens.
    """
    vocabulary = _write_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(_CONFIG))
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes(read_decoder(directory))}
    for name, values in tensors.items():
        if name.endswith("norm.weight"):
            values[:] = 1
    tensors["model.embed_tokens.weight"][:, 0] = 1
    head = tensors["lm_head.weight"]
    head[:, 0] = default / _SIZE**0.5
    for text, value in logits.items():
        head[vocabulary[text], 0] = value / _SIZE**0.5
    write_safetensors(directory / "model.safetensors", tensors)
    return directory


def _write_tokenizer(directory: Path) -> Mapping[str, int]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    texts = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    texts += [f"<{number}>" for number in range(len(texts), _VOCABULARY)]
    vocabulary = {text: id for id, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token=EOS, unk_token="<unk>", pad_token="<pad>"
    ).save_pretrained(directory)
    return vocabulary
