"""Write a Hugging Face directory of a well-known shape without weights, for `-o option.load_format=dummy`.

Such a directory has 5 MB and computes as long as a real model of that shape. Carry it to a GPU machine without a
package registry. Random weights choose any id, so its tokenizer is another model's, with fillers up to the shape's
vocabulary:

    python -m proof.compare.dummy_model llama8b DIRECTORY [--tokenizer MODEL_DIRECTORY]
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from handler.engines.huggingface.files import prepare_checkpoint

SHAPES: dict[str, dict[str, Any]] = {
    "llama1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "vocab_size": 128_256,
    },
    "llama8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "vocab_size": 128_256,
    },
    "tiny": {  # to try a command out where there is no GPU
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "vocab_size": 65_536,
    },
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "torch_dtype": "bfloat16",
}
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_AS_THEY_ARE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def write(shape: dict[str, Any], source: Path, target: Path) -> None:
    """Make `target`, with the tokenizer of the model directory `source`, which has to be a byte-level one."""
    target.mkdir(parents=True, exist_ok=True)
    given = json.loads((source / "config.json").read_text())
    ids = {name: given[name] for name in _IDS if given.get(name) is not None}
    (target / "config.json").write_text(json.dumps({**_LLAMA, **shape, **ids}, indent=1))
    (target / "generation_config.json").write_text(json.dumps(ids))
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    taken = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    if len(taken) > shape["vocab_size"]:
        raise SystemExit(f"the tokenizer of {source} has {len(taken):,} tokens, the shape {shape['vocab_size']:,}")
    # "Ġ" is byte-level BPE's space; without merges that make them, no text is ever read as one of these.
    vocabulary |= {f"Ġfiller{id}": id for id in range(shape["vocab_size"]) if id not in taken}
    (target / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    for name in _AS_THEY_ARE:
        if (source / name).is_file():
            shutil.copy(source / name, target / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="whose tokenizer (default: the demo model's)")
    given = parser.parse_args()
    write(SHAPES[given.shape], given.tokenizer or prepare_checkpoint(None), given.directory)


if __name__ == "__main__":
    main()
