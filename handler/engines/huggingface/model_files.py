"""Checks a Hugging Face directory's files before an engine loads them; messages name the file and the fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    found = [path for name in _TOKENIZERS for path in model_files.visible(directory, name)]
    if not own_code and not found:
        raise ConfigError(f"{directory} has no tokenizer: none of {', '.join(_TOKENIZERS)}")
    for path in found:
        model_files.check_content(path)


def check_checkpoint(directory: Path) -> None:
    """Raise ConfigError where a file is missing, cut short or of a wrong format."""
    check_tokenizer(directory)
    for path in weight_files(directory):
        if not path.is_file():
            raise ConfigError(f"{path} is missing; {_INDEX} names it")
    for path in (weights := model_files.visible(directory, "*.safetensors")):
        check_safetensors(path)
    if not weights:
        for path in model_files.visible(directory, "*.bin"):
            model_files.check_content(path)


def weight_files(directory: Path) -> list[Path]:
    """Return the files that transformers reads: `model.safetensors`, else those that the index names."""
    if (directory / _WHOLE).is_file():  # transformers ignores an index beside it
        return [directory / _WHOLE]
    named = model_files.read_json(directory / _INDEX).get("weight_map")
    names = {str(name) for name in named.values()} if isinstance(named, dict) else ()
    return [directory / name for name in sorted(names)]


def check_json(directory: Path, *names: str) -> None:
    """Raise ConfigError where one of the files exists and does not hold a JSON object that transformers reads."""
    for name in names:
        model_files.read_json(directory / name, mark=False)


def check_safetensors(path: Path) -> None:
    """Raise ConfigError unless the file has the length that its header describes."""
    size = path.stat().st_size
    tensors, begin = read_header(path)
    try:
        needed = begin + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    except (TypeError, KeyError, IndexError):
        raise _no_header(path) from None
    if size != needed:
        how = "is cut short" if size < needed else "is broken"
        raise ConfigError(f"{path} {how}: it holds {size:,} bytes, its header describes {needed:,}")


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return what a safetensors file says of each tensor, by its name, and at which byte the tensors begin.

    Format: 8 bytes with the header's length, the header in JSON, the tensors. github.com/huggingface/safetensors.

    Raises:
        ConfigError: it is cut short, or has no such header.
    """
    model_files.check_content(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ConfigError(f"{path} is cut short, or no safetensors file: it ends inside its header")
        if length > _MAX_HEADER:
            raise ConfigError(f"{path} is broken: it says that its header has {length:,} bytes")
        try:
            tensors = dict(json.loads(file.read(length)))
        except (ValueError, TypeError, RecursionError):
            raise _no_header(path) from None
    tensors.pop("__metadata__", None)
    return tensors, 8 + length


def _no_header(path: Path) -> ConfigError:
    return ConfigError(f"{path} is broken: its header is not that of a safetensors file")
