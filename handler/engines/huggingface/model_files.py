"""Checks a Hugging Face directory's files before an engine loads them; messages name the file and the fault."""

from __future__ import annotations

import json
from pathlib import Path

from handler.config import model_files
from handler.core.errors import ConfigError

_JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
)
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
    "*.tiktoken",
)
_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_MAX_HEADER = 100_000_000  # bytes; the limit of safetensors itself


def check_tokenizer(directory: Path) -> None:
    """Raise ConfigError where the directory has no tokenizer, or a file beside it does not hold a JSON object."""
    check_json(directory, *_JSON_FILES)
    own_code = model_files.read_json(directory / "tokenizer_config.json").get("auto_map")
    if not own_code and not any(any(directory.glob(name)) for name in _TOKENIZERS):
        raise ConfigError(f"{directory} has no tokenizer: none of {', '.join(_TOKENIZERS)}")


def check_checkpoint(directory: Path) -> None:
    """Raise ConfigError where a file is missing, cut short or of a wrong format."""
    check_tokenizer(directory)
    if not (directory / _WHOLE).is_file():  # transformers ignores an index beside it
        weight_map = model_files.read_json(directory / _INDEX).get("weight_map", {})
        for name in sorted(set(weight_map.values())) if isinstance(weight_map, dict) else ():
            if not (directory / str(name)).is_file():
                raise ConfigError(f"{directory / str(name)} is missing; {_INDEX} names it")
    for path in sorted(directory.glob("*.safetensors")):
        check_safetensors(path)


def check_json(directory: Path, *names: str) -> None:
    """Raise ConfigError where one of the files exists and does not hold a JSON object."""
    for name in names:
        model_files.read_json(directory / name)


def check_safetensors(path: Path) -> None:
    """Raise ConfigError unless the file has the length that its header describes.

    Format: 8 bytes with the header's length, the header in JSON, the tensors. github.com/huggingface/safetensors.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ConfigError(f"{path} is cut short, or no safetensors file: it ends inside its header")
        if length > _MAX_HEADER:
            raise ConfigError(f"{path} is broken: it says that its header has {length:,} bytes")
        try:
            tensors = dict(json.loads(file.read(length)))
            ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"]
            needed = 8 + length + max(ends, default=0)
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            raise ConfigError(f"{path} is broken: its header is not that of a safetensors file") from None
    if size != needed:
        how = "is cut short" if size < needed else "is broken"
        raise ConfigError(f"{path} {how}: it holds {size:,} bytes, its header describes {needed:,}")
