"""A GGUF of two random layers, and the Hugging Face directory of its tokenizer: a token for each byte, and two more."""

from __future__ import annotations

import json
from pathlib import Path

from gguf import GGMLQuantizationType as Kind
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.checkpoints.small_gguf import LETTERS, write_small

EOS, CONTEXT = 256, 2048


def make(directory: Path, architecture: str = "llama") -> Path:
    """Write the directory, with the GGUF beside the tokenizer, as `model.gguf`."""
    directory.mkdir(parents=True, exist_ok=True)
    write_small(directory / "model.gguf", Kind.F16, architecture, context=CONTEXT)
    vocabulary = {letter: id for id, letter in enumerate([*LETTERS, "<eos>", "ab"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"model_type": "llama", "vocab_size": 258, "max_position_embeddings": CONTEXT, "eos_token_id": EOS}
    (directory / "config.json").write_text(json.dumps(config))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "bos_token": "<eos>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    return directory
