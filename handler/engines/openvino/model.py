"""Prepares model files for OpenVINO, and reads their tokenizer, context length and end tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from handler.config import gguf, model_files
from handler.core.errors import ConfigError, InvalidPayload, PromptTooLong
from handler.core.media import MediaTokens, SharedMedia
from handler.core.text import Prompt, Vocabulary, check_tokens
from handler.core.values import PLAIN_TEMPLATE, Objects, Task, TemplateOptions
from handler.engines.base import EngineConfig
from handler.engines.downloads import UnknownLayout
from handler.engines.huggingface import files
from handler.engines.huggingface.files import check_checkpoint
from handler.engines.huggingface.media import media_tokens, no_images
from handler.engines.huggingface.pooling import read_pooling
from handler.engines.huggingface.tokenizer import NO_TEMPLATE, find_forms, rendered
from handler.engines.huggingface.whisper import WhisperTokenizer, whisper_ids
from handler.engines.openvino.decoder.convert import Quantization
from handler.engines.openvino.gguf import check_readable, converted_model, default_weights, writable
from handler.engines.openvino.ir_files import (
    WHISPER_PARTS,
    check_converter,
    check_directory,
    context_of,
    convert,
    ids_of,
    is_vision,
    parts,
)
from handler.engines.openvino.pooling import is_bert

log = logging.getLogger("handler.engine")

_FIXED_WEIGHTS = "cannot be quantized, unlike a Hugging Face checkpoint; omit the option"
_NO_GENERATION = "cannot be quantized, unlike a model that generates text; omit the option"

_GENERATING = (Task.GENERATION, Task.TRANSCRIPTION)

_LONG = 1 << 18  # tokens; longer than the context of any supported model
_SAMPLE = "Hello world, 12 times\n  indented"
_PART = 1 << 15  # characters encoded at a time, because the tokenizer keeps the GIL while it runs


def prepare(model_id: str | None, config: EngineConfig) -> Path:
    """Check the model's files, convert them if needed, and return the path to load."""
    model, dtype = find_model(model_id or model_files.DEMO, config), config.options.dtype
    cache = model_files.cache_directory() / "converted"
    if model.kind == "gguf" and model_files.gguf_files(model.path.parent)[1:] and Path(model_id or "").is_dir():
        log.warning("loading %s but not the other .gguf files beside it: images are not supported", model.path)
    if model.kind == "openvino" or (config.task not in _GENERATING and is_bert(model.path)):
        return model.path
    if model.kind == "huggingface":
        return convert(model.path, cache, config.task, quantization_of(config))
    if dtype == "fp32":
        return converted_model(model.path, cache, "exact")
    try:
        return converted_model(model.path, cache, default_weights(model.path) if dtype == "auto" else "blocks")
    except UnknownLayout as error:  # OpenVINO can still serve the model with rounded weights
        log.warning("OpenVINO will round the model's weights: %s", error)
        return writable(model.path, cache)


def check(model_id: str | None, config: EngineConfig) -> None:
    """Check the model's files and the options together; see `engines.check`."""
    is_demo = config.task is Task.GENERATION and model_id in (None, model_files.DEMO)
    if quantization_of(config) is not None and is_demo:
        raise ConfigError(f"option.quantize: the demo model {_FIXED_WEIGHTS}")
    if is_demo or files.is_hub_reference(model_id) or files.is_fetched(model_id):
        return
    model = find_model(model_id or model_files.DEMO, config)
    if config.options.enable_prefix_caching and model.path.is_dir() and not no_images(model.path):
        raise ConfigError(
            "option.enable_prefix_caching: OpenVINO GenAI's prefix cache could confuse one image with another; "
            "omit the option for a vision model"
        )


def quantization_of(config: EngineConfig) -> Quantization | None:
    """Return the quantization that `option.quantize` and `option.group_size` request, or None.

    Raises:
        ConfigError: group_size is set, but would have no effect.
    """
    options = config.engine_options
    quantize, group = options.get("quantization"), options.get("group_size")
    if group is not None and quantize != "int4":
        raise ConfigError("option.group_size requires option.quantize=int4, because int8 uses one group per row")
    return None if quantize is None else Quantization(8, 0) if quantize == "int8" else Quantization(4, group or 32)


def find_model(model_id: str, config: EngineConfig) -> model_files.ModelFiles:
    """Find the model `model_id`, and check that its files are complete and can be converted if needed.

    Raises:
        ConfigError: the model does not exist, is incomplete, or does not support the task or the quantization.
    """
    task, quantization = config.task, quantization_of(config)
    pools = task not in _GENERATING
    if task is not Task.GENERATION and model_id == model_files.DEMO:
        raise ConfigError(f"option.task={task.value}: the demo model only generates text; set option.model_id")
    model = model_files.locate(model_id)
    if quantization is not None and (model.kind != "huggingface" or pools):
        raise ConfigError(f"option.quantize: {model.path} {_NO_GENERATION if pools else _FIXED_WEIGHTS}")
    if task is not Task.GENERATION and model.kind == "gguf":
        raise ConfigError(f"{model.path}: option.task={task.value} needs a Hugging Face or OpenVINO directory")
    if pools:
        read_pooling(model.path, config.options.pooling)
        if not (model.path / "tokenizer.json").is_file():
            raise ConfigError(f"{model.path / 'tokenizer.json'} is missing; save it with transformers' AutoTokenizer")
    if model.kind == "huggingface":
        check_checkpoint(model.path)
        if not pools or not is_bert(model.path):
            check_converter(model.path, model_files.cache_directory() / "converted", task, quantization)
    if model.kind == "openvino":
        names = WHISPER_PARTS if task is Task.TRANSCRIPTION else parts(vision=is_vision(model.path))
        check_directory(model.path, names[:1] if pools else names)
    if model.kind == "gguf":
        try:
            check_readable(model.path, gguf.check_complete(model.path))
        except (OSError, ValueError) as error:
            raise ConfigError(str(error)) from None
    return model


class OpenVinoTokenizer:
    """A tokenizer based on OpenVINO GenAI. See `engines.base.Tokenizer`.

    Chat templates are rendered as by transformers. GenAI's own renderer lacks many features that templates use.
    """

    def __init__(self, model: Path, chat_template: str | None = None) -> None:
        import openvino_genai

        from handler.engines.huggingface.chat_template import ChatTemplate, shows_system, special_tokens

        self._tokenizer = openvino_genai.Tokenizer(str(model))
        model_template = self._tokenizer.get_original_chat_template()
        self.chat_template = str(chat_template or model_files.tokenizer_template(model_template, model) or "")
        self._template = ChatTemplate(self.chat_template, {**_end_tokens(self._tokenizer), **special_tokens(model)})
        self.vocabulary = _vocabulary(self._tokenizer)
        self.media_tokens: Mapping[str, MediaTokens] = media_tokens(model) if is_vision(model) else {}
        self._forms = find_forms(self._template.render, self.media_tokens) if self.chat_template else None
        self._has_system = shows_system(self._template.render)
        # Some tokenizers have a built-in limit and silently truncate longer prompts.
        self._longest = max(map(len, self.vocabulary.pieces))  # bytes
        self._limit = self._tokenizer.encode("a " * _LONG).input_ids.shape[1]

    def encode(self, text: str) -> Prompt:
        self._check_size(len(text), "inputs")
        return self._encode(text, "inputs", add_special_tokens=True)

    def encode_chat(self, messages: Objects, tools: Objects = (), options: TemplateOptions = PLAIN_TEMPLATE) -> Prompt:
        """Apply the chat template and encode the result, as transformers and vLLM do.

        Special tokens in a message are not escaped, so its author can impersonate another role. They are encoded as
        special tokens, as in transformers and vLLM (docs/wire/openai.md).
        """
        if not self.chat_template:
            raise InvalidPayload(NO_TEMPLATE)
        # The template adds at least one token to each message.
        self._check_size(sum(_size(message) + self._longest for message in messages), "messages")
        self._check_size(sum(map(_size, tools)), "tools")

        def render() -> str:
            return self._template.render(
                self._adapted(messages),
                tools,
                dict(options.arguments),
                add_generation_prompt=options.add_generation_prompt,
            )

        text = rendered(render, messages, options)
        self._check_size(len(text), "messages")
        return self._encode(text, "messages", add_special_tokens=False)

    def _adapted(self, messages: Objects) -> Objects:
        """Convert messages to what the template supports. If it has no system role, a user's message has its text."""
        if not self._has_system:
            from handler.engines.huggingface.chat_template import without_system

            messages = without_system(messages)
        return messages if self._forms is None else self._forms.adapt(messages)

    def _check_size(self, num_characters: int, name: str) -> None:
        """Raise PromptTooLong early for text that cannot fit, because encoding it would hold the GIL for seconds."""
        if num_characters > self._limit * self._longest:
            raise PromptTooLong(name, -(-num_characters // self._longest), self._limit - 1, exact=False)

    def _encode(self, text: str, name: str, *, add_special_tokens: bool) -> Prompt:
        check_tokens(text, name, self._limit - 1, _PART, lambda part: len(ids_of(self._tokenizer, part)))
        ids = ids_of(self._tokenizer, text, special=add_special_tokens)
        if len(ids) >= self._limit:
            raise PromptTooLong(name, self._limit, self._limit - 1, exact=False)
        # A vision model's engine needs the text as well as the ids.
        return Prompt(text, ids, self.vocabulary, SharedMedia(text, ()) if self.media_tokens else None)


def _end_tokens(tokenizer: Any) -> dict[str, str]:
    """Return the first and the last token of a text, which a GGUF file names, as variables of the chat template."""
    tokens = {"bos_token": tokenizer.get_bos_token(), "eos_token": tokenizer.get_eos_token()}
    return {name: token for name, token in tokens.items() if token}


def _size(value: Any) -> int:
    """Count the characters of all strings in a JSON value, except keys."""
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_size, value))
    return len(value) if isinstance(value, str) else 0


def _vocabulary(tokenizer: Any) -> Vocabulary:
    """Return the bytes of each token, because OpenVINO's `decode` loses characters that span several tokens."""
    by_id = {id: piece for piece, id in tokenizer.get_vocab().items()}
    ids = range(max(by_id) + 1)
    hidden, visible = (tokenizer.decode([[id] for id in ids], skip_special_tokens=skip) for skip in (True, False))
    vocabulary = Vocabulary([by_id.get(id, b"") for id in ids], [id for id in ids if hidden[id] != visible[id]])
    if b"".join(vocabulary.pieces[id] for id in ids_of(tokenizer, _SAMPLE)) != _SAMPLE.encode():
        raise ConfigError("OpenVINO GenAI cannot export the vocabulary of this model's tokenizer as bytes")
    return vocabulary


def load_whisper_tokenizer(model: Path) -> WhisperTokenizer:
    import openvino_genai

    tokenizer = openvino_genai.Tokenizer(str(model))
    return WhisperTokenizer(_vocabulary(tokenizer), partial(ids_of, tokenizer), whisper_ids(model))


def context_length(model: Path) -> int | None:
    """Read the context length, in tokens, from the model's files. Return None if they do not specify it."""
    if gguf.is_gguf_name(model):
        return gguf.context_length(model)
    context = context_of(model)
    return context if isinstance(context, int) else None


def eos_ids(config: EngineConfig, tokenizer: Any) -> frozenset[int]:
    """Return the ids of the end tokens specified by the model's files and by OpenVINO's tokenizer."""
    eos_id = tokenizer.get_eos_token_id()
    return files.eos_ids(config) | ({eos_id} if eos_id >= 0 else set())
