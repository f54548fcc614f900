"""Reads the files of pooling models, tokenizes texts, and converts the models' output to embeddings and scores.

The files are `modules.json` and the files that it lists, as in github.com/huggingface/sentence-transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from handler.config import model_files
from handler.config.model_files import label_names, read_json
from handler.core import text_files
from handler.core.errors import ConfigError, InvalidParameter, InvalidPayload, PromptTooLong
from handler.core.media import MediaTokens
from handler.core.text import Prompt, Vocabulary, check_tokens, prompt_of_ids
from handler.core.values import PLAIN_TEMPLATE, Extras, Finish, Objects, Pooling, Request, TemplateOptions
from handler.engines.base import EngineInfo, Output, Tokenizer
from handler.engines.huggingface.tokenizer import MOST_TOKENS, PART, ContentForms, find_forms, rendered

if TYPE_CHECKING:
    from handler.engines.huggingface.chat_template import ChatTemplate

NO_POOLED_LORA = "adapters are supported only for text generation (option.task)"

MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
"""Flags in a Pooling module's config.json, with the mode that each enables. Newer files have `pooling_mode` instead."""

_MODULES = ("Transformer", "Pooling", "Normalize")
_ANY = 1 << 30  # tokens; transformers writes a larger number if there is no limit
_LEAST = 1e-12  # smallest length to divide by, as in torch's `normalize`


class PoolingFiles(NamedTuple):
    """How a model pools, according to its files.

    Attributes:
        mode: how a text is pooled: to the embedding of the first token (cls) or of the last token, or to the mean or
            the maximum (max) of all token embeddings.
        normalize: whether embeddings are normalized to length 1 unless a request says otherwise.
        most_tokens: maximum number of tokens in a text, including special tokens; None means no limit.
        exclusive: whether exactly one of several labels applies.
    """

    mode: str
    normalize: bool
    most_tokens: int | None
    exclusive: bool

    def limit(self, max_tokens: int) -> int:
        """Return the maximum number of tokens in a text, which is at most `max_tokens`."""
        return min(self.most_tokens or max_tokens, max_tokens)

    def described(self, info: EngineInfo, dimensions: int) -> EngineInfo:
        """Return the information about an engine with the limit for a text, and an embedding's dimensions."""
        return replace(info, max_total_tokens=self.limit(info.max_total_tokens), dimensions=dimensions)

    def finish(self, values: Any, pooling: Pooling) -> list[float]:
        """Convert the model's output for a text to the requested embedding, scores or class probabilities.

        Args:
            values: the pooled embedding, or a logit for each label. Numbers of another type become those of 32 bits.
        """
        import numpy

        values = numpy.asarray(values, numpy.float32)
        if pooling.kind == "embed":
            numbers = values[: pooling.dimensions]
            if self.normalize if pooling.normalize is None else pooling.normalize:
                numbers = numbers / max(float(numpy.linalg.norm(numbers)), _LEAST)
        elif not pooling.normalize:
            numbers = values
        elif self.exclusive and len(values) > 1:
            numbers = numpy.exp(values - values.max())
            numbers /= numbers.sum()
        else:
            numbers = 1 / (1 + numpy.exp(-values))
        finished: list[float] = numbers.tolist()
        return finished

    def output(self, key: int, values: Any, pooling: Pooling) -> Output:
        """Return the output that ends a request; see `finish`."""
        return Output(key, finish=Finish.EOS, extras=Extras(vector=self.finish(values, pooling)))


def read_pooling(model: Path, option: str = "auto") -> PoolingFiles:
    """Determine from the files of a model how it pools.

    Args:
        option: value of option.pooling, which overrides the files unless it is auto.

    Raises:
        ConfigError: a file is broken, or specifies an unsupported computation; the message names the file.
    """
    modules = _modules(model)
    mode, normalize = "mean", False  # sentence-transformers' default for a model without modules
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling" and option == "auto":
            mode = _mode(model / str(module.get("path", "")) / "config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind not in _MODULES:
            raise ConfigError(f"{model / 'modules.json'}: the module {kind[:64]!r} is not supported")
    config = model_files.read_json(model / "config.json")
    exclusive = config.get("problem_type") != "multi_label_classification" and len(label_names(model)) > 1
    return PoolingFiles(mode if option == "auto" else option, normalize, _most_tokens(model, config), exclusive)


def _modules(model: Path) -> list[dict[str, Any]]:
    file = model / "modules.json"
    if not file.is_file():
        return []
    import json

    try:
        modules = json.loads(text_files.read_text(file))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ConfigError(f"{file} does not contain a list of modules")
    return modules


def _mode(file: Path) -> str:
    config = model_files.read_json(file)
    if pooling_mode := config.get("pooling_mode"):
        modes = (
            [{"lasttoken": "last"}.get(pooling_mode, pooling_mode)]
            if isinstance(pooling_mode, str)
            else list(pooling_mode)
        )
    else:
        flags = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
        modes = [MODES.get(flag, flag) for flag in flags] or ["mean"]
    if len(modes) != 1 or modes[0] not in MODES.values():
        raise ConfigError(
            f"{file}: pooling by {' and '.join(map(str, modes))} is not supported; must be one of "
            f"{', '.join(MODES.values())}"
        )
    return str(modes[0])


def _most_tokens(model: Path, config: dict[str, Any]) -> int | None:
    """Return the lowest limit of the model, its tokenizer and its sentence-transformers configuration, or None."""
    max_seq_length = model_files.read_json(model / "sentence_bert_config.json").get("max_seq_length")
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and "roberta" in str(config.get("model_type")):
        positions -= int(config.get("pad_token_id", 1)) + 1  # RoBERTa's positions begin after the padding id
    max_length = model_files.read_json(model / "tokenizer_config.json").get("model_max_length")
    limits = [limit for limit in (max_seq_length, positions, max_length) if isinstance(limit, int) and 0 < limit < _ANY]
    return min(limits, default=None)


# -- conversion of texts and pairs of texts to ids with a model's special tokens, truncated if allowed -----------------


class PooledTexts(NamedTuple):
    """One or two encoded texts.

    Attributes:
        second: index of the first token of the second text, or None if the model does not need this index.
        texts: the texts as truncated, if the engine needs them besides their ids.
    """

    prompt: Prompt
    second: int | None
    texts: tuple[str, ...] = ()


class PoolingTokenizer(Tokenizer, Protocol):
    """The tokenizer of an engine that was loaded for embedding, scoring or classification."""

    def encode_pooled(
        self, texts: Sequence[str], most: int | None, side: str | None, *, special: bool = True
    ) -> PooledTexts:
        """Encode a text, or two texts as a pair, with the special tokens that the model expects.

        Args:
            special: whether to add the special tokens. The text of a rendered chat contains its own.
            most: maximum total number of tokens, including special tokens; None means no limit.
            side: side on which tokens are removed, left or right, beginning with the longer text. None means that texts
                are not truncated.

        Raises:
            PromptTooLong: there are more than `most` tokens, and `side` is None or `most` leaves no room for text.
        """

    def render_chat(self, messages: Objects, options: TemplateOptions) -> str:
        """Apply the chat template.

        Raises:
            InvalidPayload: the model has no chat template, or the template raises an exception for these messages.
            GenerationFailed: the template has a syntax error.
        """


def encode_pooled(
    request: Request, tokenizer: Tokenizer, info: EngineInfo | None = None, max_input_len: int | None = None
) -> tuple[Request, Prompt]:
    """Tokenize a Pooling request. The engine, `option.max_input_len` and the request itself can each limit its length.

    Raises:
        PromptTooLong: the text has too many tokens.
        InvalidPayload: the text has no tokens, or the tokenizer refuses it.
        InvalidParameter: the model's embeddings have fewer dimensions than requested, or a token id is unknown.
    """
    pooling, names = request.pooling, request.names
    assert pooling is not None, "the request has Pooling"
    truncated, side = request.truncation or (None, None)
    limits = (info and info.max_total_tokens, max_input_len, truncated)
    most = min((limit for limit in limits if limit), default=None)
    if pooling.dimensions is not None and info is not None and not 0 < pooling.dimensions <= info.dimensions:
        raise InvalidParameter(
            f"{names.dimensions}={pooling.dimensions}: the model's embeddings have {info.dimensions} dimensions"
        )
    second, kept = None, tuple[str, ...]()
    if request.prompt_ids is not None:
        prompt = _cut(prompt_of_ids(request, request.prompt_ids, tokenizer.vocabulary), most, side, names.prompt)
    else:
        pooled = cast(PoolingTokenizer, tokenizer)
        texts = [request.prompt] if request.pair is None else [request.prompt, request.pair]
        if request.messages:
            texts = [pooled.render_chat(request.messages, request.template)]
        try:
            prompt, second, kept = pooled.encode_pooled(texts, most, side, special=not request.messages)
        except PromptTooLong as error:
            raise error.named(names.prompt) from None
    if not prompt.ids:
        raise InvalidPayload(f"'{names.prompt}' has no tokens")
    return request._replace(pooling=pooling._replace(second=second, texts=kept)), prompt


def _cut(prompt: Prompt, most: int | None, side: str | None, name: str) -> Prompt:
    """Truncate a prompt that a client sent as token ids, which already include the special tokens."""
    if most is None or len(prompt.ids) <= most:
        return prompt
    if side is None:
        raise PromptTooLong(name, len(prompt.ids), most)
    return prompt._replace(ids=prompt.ids[:most] if side == "right" else prompt.ids[-most:])


class HfPoolingTokenizer:
    """A tokenizer based on the package `tokenizers`, which releases the GIL. See `PoolingTokenizer`.

    Args:
        model: a Hugging Face directory.
        chat_template: template that replaces the model's own.
        keeps_texts: whether the engine needs the texts besides their ids.

    Raises:
        ConfigError: the directory has no tokenizer.json.
    """

    media_tokens: Mapping[str, MediaTokens] = MappingProxyType({})

    def __init__(self, model: Path, chat_template: str | None = None, *, keeps_texts: bool = False) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        file = model / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{file} is missing; create it with `save_pretrained` of transformers' AutoTokenizer")
        self._fast: Any = FastTokenizer.from_file(str(file))
        self._fast.no_truncation()
        self._fast.no_padding()
        pieces = {id: piece for piece, id in self._fast.get_vocab(with_added_tokens=True).items()}
        special = [id for id, token in self._fast.get_added_tokens_decoder().items() if token.special]
        encoded = [pieces.get(id, "").encode() for id in range(max(pieces) + 1)]
        self.vocabulary = Vocabulary(encoded, special)
        self._has_types = _has_types(model)
        self._num_special = [self._fast.num_special_tokens_to_add(is_pair) for is_pair in (False, True)]
        self.chat_template = chat_template or model_files.saved_template(model)
        self._model = model
        self._keeps_texts = keeps_texts

    def num_special(self, *, is_pair: bool) -> int:
        """Return the number of special tokens that are added to a text or a pair."""
        return self._num_special[is_pair]

    def encode(self, text: str) -> Prompt:
        return self.encode_pooled([text], None, None).prompt

    def encode_chat(self, messages: Objects, tools: Objects = (), options: TemplateOptions = PLAIN_TEMPLATE) -> Prompt:
        return self.encode_pooled([self.render_chat(messages, options)], None, None, special=False).prompt

    def render_chat(self, messages: Objects, options: TemplateOptions) -> str:
        """Apply the chat template; see `PoolingTokenizer.render_chat`."""
        if not self.chat_template:
            raise InvalidPayload("'messages': the model has no chat template; send a text as 'input'")

        def render() -> str:
            template, forms = self._template
            return template.render(
                forms.adapt(messages),
                arguments=dict(options.arguments),
                add_generation_prompt=options.add_generation_prompt,
            )

        return rendered(render, messages, options)

    @functools.cached_property
    def _template(self) -> tuple[ChatTemplate, ContentForms]:
        """The template, and the content that it supports. Its import is deferred, because few clients send chats."""
        from handler.engines.huggingface.chat_template import ChatTemplate, special_tokens

        template = ChatTemplate(self.chat_template, special_tokens(self._model))
        return template, find_forms(template.render, {})

    def encode_pooled(
        self, texts: Sequence[str], most: int | None, side: str | None, *, special: bool = True
    ) -> PooledTexts:
        """Encode one or two texts; see `PoolingTokenizer.encode_pooled`."""
        for text in texts:
            check_tokens(text, "inputs", MOST_TOKENS, PART, lambda part: len(self._parts([part])[0].ids))
        parts = self._parts(texts)
        lengths = [len(part.ids) for part in parts]
        num_special = self._num_special[len(texts) > 1] if special else 0
        if most is not None and sum(lengths) + num_special > most:
            if side is None or most <= num_special:
                raise PromptTooLong("inputs", sum(lengths) + num_special, most)
            for part, length in zip(parts, fit(lengths, most - num_special), strict=True):
                part.truncate(length, direction=side)
            texts = [_kept(text, part, side) for text, part in zip(texts, parts, strict=True)]
        whole = self._fast.post_process(*parts, add_special_tokens=special)
        second = whole.type_ids.index(1) if self._has_types and 1 in whole.type_ids else None
        return PooledTexts(
            Prompt(texts[0], whole.ids, self.vocabulary), second, tuple(texts) if self._keeps_texts else ()
        )

    def _parts(self, texts: Sequence[str]) -> list[Any]:
        encode = self._fast.encode_batch if self._keeps_texts else self._fast.encode_batch_fast  # without offsets
        return list(encode(texts, add_special_tokens=False))


def _kept(text: str, part: Any, side: str) -> str:
    """Return the part of a text that remains after its tokens were truncated."""
    if not part.offsets:
        return ""
    return text[: part.offsets[-1][1]] if side == "right" else text[part.offsets[0][0] :]


def _has_types(model: Path) -> bool:
    """Return whether the model needs token_type_ids.

    The model needs them if the tokenizer lists them as input and the model has more than one type. This cannot be
    determined from tokenizer.json alone, which may assign types even if the model was trained without types.
    """
    inputs = read_json(model / "tokenizer_config.json").get("model_input_names")
    if isinstance(inputs, list) and "token_type_ids" not in inputs:
        return False
    return read_json(model / "config.json").get("type_vocab_size") not in (0, 1)


def fit(lengths: Sequence[int], most: int) -> list[int]:
    """Return how many tokens to keep from each of one or two texts. The longer text is truncated first."""
    if len(lengths) == 1:
        return [min(lengths[0], most)]
    first, second = lengths
    shorter = min(first, second, most // 2)
    return [shorter, min(second, most - shorter)] if first <= second else [min(first, most - shorter), shorter]
