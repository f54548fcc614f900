"""Turns texts and pairs of texts into a model's ids, with its special tokens, cut where that is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast

from handler.config.model_files import read_json
from handler.core.errors import ConfigError, InvalidParameter, InvalidPayload, PromptTooLong
from handler.core.media import MediaTokens
from handler.core.text import Prompt, Vocabulary, check_tokens, given_prompt
from handler.core.values import PLAIN_TEMPLATE, Request, TemplateOptions
from handler.engines.base import EngineInfo, Tokenizer

_MOST_TOKENS = 1 << 20  # of a text; making Python objects of more would hold the GIL for long
_PART = 1 << 20  # characters of a part of a long text


class PoolingTokenizer(Tokenizer, Protocol):
    """The tokenizer of an engine that was loaded for embeddings, scores or classification."""

    def encode_pooled(self, texts: Sequence[str], most: int | None, side: str | None) -> tuple[Prompt, int | None]:
        """Encode a text, or two as the model's pair, with the special tokens that the model wants around them.

        Args:
            most: tokens that all may have, special ones included; None: any number.
            side: where more are cut off, left or right, of a longer text first; None refuses them.

        Returns:
            The prompt, and the index of the first token that the model takes for one of the second text's, if any.

        Raises:
            PromptTooLong: there are more tokens.
        """


def encode_pooled(
    request: Request, tokenizer: Tokenizer, info: EngineInfo | None = None, max_input_len: int | None = None
) -> tuple[Request, Prompt]:
    """Tokenize a request with Pooling; the limits are the engine's, `option.max_input_len` and the request's own.

    Raises:
        PromptTooLong, InvalidPayload: the text cannot be computed.
        InvalidParameter: an embedding has fewer dimensions, or an id is unknown.
    """
    pooling, names = request.pooling, request.names
    assert pooling is not None, "only such requests come here"
    asked, side = request.truncation or (None, None)
    limits = (info and info.max_total_tokens, max_input_len, asked)
    most = min((limit for limit in limits if limit), default=None)
    if pooling.dimensions is not None and info is not None and not 0 < pooling.dimensions <= info.dimensions:
        raise InvalidParameter(
            f"{names.dimensions}={pooling.dimensions}: the model's vectors have {info.dimensions} numbers"
        )
    second = None
    if request.prompt_ids is not None:
        prompt = _cut(given_prompt(request, request.prompt_ids, tokenizer.vocabulary), most, side, names.prompt)
    else:
        texts = [request.prompt] if request.pair is None else [request.prompt, request.pair]
        try:
            prompt, second = cast(PoolingTokenizer, tokenizer).encode_pooled(texts, most, side)
        except PromptTooLong as error:
            raise error.named(names.prompt) from None
    if not prompt.ids:
        raise InvalidPayload(f"'{names.prompt}' has no tokens")
    return request._replace(pooling=pooling._replace(second=second)), prompt


def _cut(prompt: Prompt, most: int | None, side: str | None, name: str) -> Prompt:
    """Cut a text that came as ids, whose special tokens are the client's."""
    if most is None or len(prompt.ids) <= most:
        return prompt
    if side is None:
        raise PromptTooLong(name, len(prompt.ids), most)
    return prompt._replace(ids=prompt.ids[:most] if side == "right" else prompt.ids[-most:])


class HfPoolingTokenizer:
    """See `PoolingTokenizer`. Reads tokenizer.json by the package tokenizers, which runs outside the GIL.

    Args:
        model: a Hugging Face directory.

    Raises:
        ConfigError: the directory has no tokenizer.json.
    """

    chat_template = ""
    media_tokens: Mapping[str, MediaTokens] = MappingProxyType({})

    def __init__(self, model: Path) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        file = model / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{file} is missing; transformers writes it: AutoTokenizer's save_pretrained")
        self._fast: Any = FastTokenizer.from_file(str(file))
        self._fast.no_truncation()
        self._fast.no_padding()
        pieces = {id: piece for piece, id in self._fast.get_vocab(with_added_tokens=True).items()}
        special = [id for id, token in self._fast.get_added_tokens_decoder().items() if token.special]
        known = [pieces.get(id, "").encode() for id in range(max(pieces) + 1)]
        self.vocabulary: Vocabulary | None = Vocabulary(known, special)
        self._vocabulary = self.vocabulary
        self._has_types = _has_types(model)
        self._num_special = [self._fast.num_special_tokens_to_add(is_pair) for is_pair in (False, True)]

    def encode(self, text: str) -> Prompt:
        return self.encode_pooled([text], None, None)[0]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: TemplateOptions = PLAIN_TEMPLATE,
    ) -> Prompt:
        raise InvalidPayload("'messages': the model takes texts, no chats")

    def encode_pooled(self, texts: Sequence[str], most: int | None, side: str | None) -> tuple[Prompt, int | None]:
        """See `PoolingTokenizer`."""
        for text in texts:
            check_tokens(text, "inputs", _MOST_TOKENS, _PART, lambda part: len(self._parts([part])[0].ids))
        parts = self._parts(texts)
        lengths, num_special = [len(part.ids) for part in parts], self._num_special[len(texts) > 1]
        if most is not None and (total := sum(lengths) + num_special) > most:
            if side is None or most <= num_special:
                raise PromptTooLong("inputs", total, most)
            for part, length in zip(parts, fit(lengths, most - num_special), strict=True):
                part.truncate(length, direction=side)
        whole = self._fast.post_process(*parts, add_special_tokens=True)
        second = whole.type_ids.index(1) if self._has_types and 1 in whole.type_ids else None
        return Prompt(texts[0], whole.ids, self._vocabulary), second

    def _parts(self, texts: Sequence[str]) -> list[Any]:
        return list(self._fast.encode_batch_fast(texts, add_special_tokens=False))


def _has_types(model: Path) -> bool:
    """Whether the model wants token_type_ids: its tokenizer's inputs have them, and it has more types than one.

    A tokenizer.json may mark the second text for a model that never learned the mark.
    """
    inputs = read_json(model / "tokenizer_config.json").get("model_input_names")
    if isinstance(inputs, list) and "token_type_ids" not in inputs:
        return False
    return read_json(model / "config.json").get("type_vocab_size") not in (0, 1)


def fit(lengths: Sequence[int], most: int) -> list[int]:
    """Return how many tokens each text keeps, of one or two: tokens of the longer one go first."""
    if len(lengths) == 1:
        return [min(lengths[0], most)]
    first, second = lengths
    shorter = min(first, second, most // 2)
    return [shorter, min(second, most - shorter)] if first <= second else [min(first, most - shorter), shorter]
