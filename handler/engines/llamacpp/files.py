"""Makes Hugging Face model directories without weights from GGUF files, for servers that read the files themselves."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from handler.config import gguf, model_files
from handler.core.errors import ConfigError
from handler.engines.downloads import SOURCE, fingerprint, make_once
from handler.engines.huggingface.files import has_tokenizer
from handler.engines.llamacpp.tokenizer import tokenizer_json
from handler.engines.llamacpp.vocabulary import REMEDY, GgufVocabulary

log = logging.getLogger("handler.engine")

_RECIPE = b"llamacpp 3"  # part of every fingerprint: change it whenever the content of the directory changes
_TEMPLATE = "tokenizer.chat_template"
_TOKENS = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep", "mask": "mask"}
"""Maps the name of a special token in a GGUF file to its name in tokenizer_config.json."""

ARCHITECTURE = "gguf_architecture"
"""The name of the file's architecture in config.json, such as `qwen3`."""
_CONFIG: Mapping[str, object] = {"transformers_version": "5.0.0"}
"""There is no model_type, because transformers would replace the tokenizer with its own for some types. Because of the
version, transformers does not take the tokenizer for one of Mistral's with a wrong pattern.
"""


class UnsupportedTokenizer(ConfigError):
    """Raised if the kind of a file's tokenizer is not supported."""


def model_directory(gguf: Path) -> Path:
    """Return a directory with the tokenizer, chat template, end tokens and configuration of a GGUF file.

    A container image may include the directory in `converted/` beside the file. Otherwise, it is created once below
    the cache directory. If the tokenizer in the file is not supported, the directory of the file is returned, provided
    that it contains a tokenizer.

    Raises:
        ConfigError: the file is not a model, there is no supported tokenizer, or the directory cannot be written.
    """
    try:
        name = fingerprint(_RECIPE, [gguf])
        beside = gguf.parent / "converted" / name
        if beside.is_dir():
            return beside
        return make_once(model_files.cache_directory() / "converted" / name, lambda target, _: _write(gguf, target))
    except UnsupportedTokenizer as error:
        if not has_tokenizer(gguf.parent):
            raise
        log.warning("%s; the tokenizer files beside it are used instead", str(error).removesuffix(f": {REMEDY}"))
        return gguf.parent
    except OSError as error:
        if error.filename in (None, str(gguf)):
            raise ConfigError(f"cannot read {gguf}: {error}") from None
        raise ConfigError(
            f"cannot write the tokenizer of {gguf}: {error}; set LMI_CACHE to another directory"
        ) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None


def is_model_directory(directory: Path) -> bool:
    """Return whether `model_directory` has written a directory."""
    return (directory / SOURCE).is_file() and gguf.is_gguf_name((directory / SOURCE).read_text())


def served_file(model_id: str | None) -> Path | None:
    """Return the GGUF file of a local model, or None if `model_id` names something else, or has its own tokenizer.

    Raises:
        ConfigError: the model is a directory with several GGUF files.
    """
    path = Path(model_id or "")
    if path.is_file() and gguf.is_gguf_name(path):
        return path
    if model_id and path.is_dir() and not has_tokenizer(path) and model_files.gguf_files(path):
        return model_files.locate(model_id).path
    return None


def _write(source: Path, target: Path) -> None:
    header = gguf.read_tokenizer(source)
    kind, _ = gguf.contents_of(header.values)
    if kind != "model":
        raise ConfigError(f"{source} is not a model, but extends a model ({kind}): name the model's own file")
    try:
        vocabulary = GgufVocabulary.read(header)
        tokenizer = tokenizer_json(vocabulary)
    except ConfigError as error:
        raise UnsupportedTokenizer(f"{source}: {error}") from None
    _check(source, tokenizer)
    target.mkdir(parents=True)
    length = gguf.find_context_length(header.values.items())
    architecture = _text(header.values.get(b"general.architecture"))
    described = {ARCHITECTURE: architecture, "max_position_embeddings": length}
    files = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": _tokenizer_config(vocabulary, header.values, length),
        "generation_config.json": _generation_config(vocabulary),
        "config.json": {**_CONFIG, "vocab_size": len(vocabulary.texts), **described},
    }
    for name, content in files.items():
        (target / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    (target / SOURCE).write_text(str(source.absolute()))


def _check(source: Path, tokenizer: Mapping[str, Any]) -> None:
    """Raise UnsupportedTokenizer if `tokenizers` refuses the tokenizer."""
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_str(json.dumps(tokenizer))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # its own error is Exception itself, and a panic is not even that
        raise UnsupportedTokenizer(f"{source}: its tokenizer cannot be loaded ({error}): {REMEDY}") from None


def _tokenizer_config(
    vocabulary: GgufVocabulary, values: Mapping[bytes, object], length: int | None
) -> dict[str, object]:
    tokens = {
        f"{name}_token": vocabulary.texts[vocabulary.special[key]]
        for key, name in _TOKENS.items()
        if key in vocabulary.special and vocabulary.is_special(vocabulary.special[key])
    }
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **tokens,
    }
    if length is not None:
        config["model_max_length"] = length
    bos = str(tokens.get("bos_token", "")) if vocabulary.adds_bos else ""
    if template := _chat_template(values, bos):
        config["chat_template"] = template
    return config


def _generation_config(vocabulary: GgufVocabulary) -> dict[str, object]:
    ids = {f"{name}_token_id": vocabulary.special.get(name) for name in ("bos", "eos")}
    return {name: id for name, id in ids.items() if id is not None} | (
        {"eos_token_id": sorted(vocabulary.ends)} if vocabulary.ends else {}
    )


def _chat_template(values: Mapping[bytes, object], bos: str) -> str | list[dict[str, str]] | None:
    """Return the chat template, or all of them if there are several.

    Args:
        bos: token with which llama.cpp begins each prompt, even if the template does not; "" if there is none.
    """
    templates = {
        key.decode(errors="replace").removeprefix(_TEMPLATE).removeprefix("."): _text(value)
        for key, value in values.items()
        if key == _TEMPLATE.encode() or key.startswith(f"{_TEMPLATE}.".encode())
    }
    by_name = {
        name or "default": text if not bos or "bos_token" in text or bos in text else "{{ bos_token }}" + text
        for name, text in templates.items()
        if text
    }
    if set(by_name) <= {"default"}:
        return by_name.get("default")
    return [{"name": name, "template": text} for name, text in by_name.items()]


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else ""
