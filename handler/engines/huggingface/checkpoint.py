"""Hugging Face model directories for the GPU engines: location, conversion of the demo model, end tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from handler.config import generation_config, model_files
from handler.core.errors import ConfigError, Problems
from handler.engines.base import EngineConfig
from handler.engines.huggingface.hub import is_fetched
from handler.engines.huggingface.mistral import mistral_eos_id
from handler.engines.huggingface.model_files import check_checkpoint
from handler.engines.huggingface.tokenizer import HfTokenizer
from handler.engines.model_cache import fingerprint, make_once, run_converter

log = logging.getLogger("handler.engine")

TORCH_DTYPES = {"auto": "auto", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""`option.dtype` -> torch's name."""

_NEEDED = ("config.json", "model.safetensors", "tokenizer.json")
_RECIPE = b"hf 1"  # part of every fingerprint: change it with _FROM_GGUF

# transformers makes a tokenizer from the GGUF file, but does not split digits; and it would save the weights twice, as
# the embeddings and the last matrix are the same.
_FROM_GGUF = """
import json, sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
source, target = Path(sys.argv[1]), Path(sys.argv[2])
read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
given = read.config.to_dict()
kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "rope_theta",
        "bos_token_id", "eos_token_id", "pad_token_id")
config = LlamaConfig(**{name: given[name] for name in kept if given.get(name) is not None}, tie_word_embeddings=True)
model = LlamaForCausalLM(config)
missing, unexpected = model.load_state_dict(read.state_dict(), strict=False)
assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
model.tie_weights()
model.to(torch.bfloat16).save_pretrained(target)
AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
file = target / "tokenizer.json"
tokenizer = json.loads(file.read_text())
tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
    {"type": "Digits", "individual_digits": True},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]}
file.write_text(json.dumps(tokenizer))
"""

_EXPECTED = f"a Hugging Face model directory, a hub's name (owner/model), or {model_files.DEMO!r}"


def prepare_checkpoint(model_id: str | None) -> Path:
    """Return the directory of `option.model_id`, which the demo model gets once.

    Raises:
        ConfigError: there is no such model, or no directory of Hugging Face's format.
    """
    if model_id is None or model_id == model_files.DEMO:
        return _demo_checkpoint(model_files.locate(model_files.DEMO).path)
    return find_checkpoint(model_id)


def find_checkpoint(model_id: str) -> Path:
    """Check the directory of `option.model_id`, and return it.

    Raises:
        ConfigError: there is no such model, or no directory of Hugging Face's format.
    """
    directory = Path(model_id)
    mistrals = (directory / "params.json").is_file() and not (directory / "config.json").exists()
    if mistrals or ((directory / "config.json").is_file() and model_files.visible(directory, "*.safetensors")):
        model = model_files.Model("huggingface", directory)  # whatever lies beside it; vLLM reads Mistral's own form
    else:
        model = model_files.locate(model_id, _EXPECTED)
    if model.kind != "huggingface":
        raise ConfigError(f"{model.path} is a {model.kind} model; this engine serves Hugging Face model directories")
    check_checkpoint(model.path)
    return model.path


def check_model(model_id: str | None, config: EngineConfig, arguments: Callable[[EngineConfig], object]) -> None:
    """Check the model's directory, and the engine's arguments, which `arguments` makes.

    Raises:
        ConfigError: with the problems of both.
    """
    problems, model = Problems(), None
    with problems:
        if model_id not in (None, model_files.DEMO) and not is_fetched(model_id):
            model = find_checkpoint(model_id)
    with problems:
        arguments(replace(config, model=model))
    problems.check()


def _demo_checkpoint(source: Path) -> Path:
    """Make SmolLM2 a Hugging Face directory in bf16; needs torch, transformers, gguf and accelerate."""

    def make(directory: Path, lock: int) -> None:
        log.info("making a Hugging Face directory of the demo model, once; this takes half a minute")
        run_converter(_FROM_GGUF, source, directory, lock, _NEEDED, "Hugging Face's format")

    return make_once(model_files.cache_directory() / "converted" / fingerprint(_RECIPE, [source]), make)


def load_tokenizer(config: EngineConfig) -> HfTokenizer:
    assert config.model is not None
    return HfTokenizer(
        config.model,
        trust_remote_code=bool(config.options.engine_options.get("trust_remote_code")),
        chat_template=config.chat_template,
        content_format=config.options.engine_options.get("chat_template_content_format", "auto"),
    )


def eos_ids(config: EngineConfig) -> frozenset[int]:
    """Return the ids that end an answer: generation_config.json's, else config.json's; and the tokenizer's."""
    assert config.model is not None
    own = tokenizer_eos_id(config.model)
    of_tokenizer = frozenset() if own is None else frozenset({own})
    generation = generation_config.file_values(config.options, config.model)
    for values in (generation, model_files.read_json(config.model / "config.json")):
        if (ids := values.get("eos_token_id")) is not None:
            return of_tokenizer | frozenset(ids if isinstance(ids, list) else [ids])
    return of_tokenizer


def tokenizer_eos_id(model: Path) -> int | None:
    """Return the id of the EOS in tokenizer_config.json, special_tokens_map.json or tekken.json; None without one."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = model_files.read_json(model / name).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if text is not None:
            tokenizer = model_files.read_json(model / "tokenizer.json")
            added = {token_entry["content"]: token_entry["id"] for token_entry in tokenizer.get("added_tokens") or ()}
            vocabulary = (tokenizer.get("model") or {}).get("vocab")
            id = {**(vocabulary if isinstance(vocabulary, dict) else {}), **added}.get(text)
            return None if id is None else int(id)
    return mistral_eos_id(model)
