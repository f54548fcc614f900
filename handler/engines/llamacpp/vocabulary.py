"""The vocabulary in the header of a GGUF file, with the defaults and corrections of llama.cpp (src/llama-vocab.cpp)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from enum import IntEnum
from typing import NamedTuple

from handler.config import gguf
from handler.core.errors import ConfigError
from handler.engines.llamacpp.splits import WORDS, Words

REMEDY = (
    "put tokenizer.json, tokenizer_config.json, generation_config.json and config.json from the model's Hugging "
    "Face directory beside the file"
)


class TokenType(IntEnum):
    """llama.cpp's types of tokens."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_SPECIAL = (TokenType.UNKNOWN, TokenType.CONTROL)
_ADDED = (*_SPECIAL, TokenType.USER_DEFINED)


class GgufVocabulary(NamedTuple):
    """The vocabulary of a GGUF file.

    Attributes:
        model: the kind of tokenizer, as in `tokenizer.ggml.model`.
        words: how texts are divided into words.
        texts: the text of each token, by id.
        kinds: the kind of each token, by id.
        merges: the pairs of tokens to merge, in order.
        scores: the score of each token, by id.
        special: the ids of special tokens, by name in `tokenizer.ggml.NAME_token_id`.
        ends: the ids of the tokens that end a response.
        adds_bos: whether a text begins with the BOS token.
        adds_eos: whether a text ends with the EOS token.
        adds_space: whether a text begins with a space if the tokenizer is SentencePiece's.
        merges_spaces: whether runs of spaces count as one, if the tokenizer is T5's.
        characters: the table with which texts are normalized, if the tokenizer is T5's.
        lowercase: whether texts are converted to lower case, if the tokenizer is BERT's.
        strips_accents: whether accents are removed, if the tokenizer is BERT's.
        left_stripped: ids of tokens that take the spaces in front of them.
        right_stripped: ids of tokens that take the spaces after them.
    """

    model: str
    words: Words
    texts: Sequence[str]
    kinds: Sequence[TokenType]
    merges: Sequence[tuple[str, str]]
    scores: Sequence[float]
    special: Mapping[str, int]
    ends: Set[int]
    adds_bos: bool
    adds_eos: bool
    adds_space: bool
    merges_spaces: bool
    characters: bytes
    lowercase: bool
    strips_accents: bool
    left_stripped: Set[int]
    right_stripped: Set[int]

    @classmethod
    def read(cls, header: gguf.TokenizerHeader) -> GgufVocabulary:
        """Read the vocabulary from a header.

        Raises:
            ConfigError: the header contains no tokenizer, or one that is not supported.
        """
        values, texts = header.values, _texts(header.tokens)
        model = _text(values, "tokenizer.ggml.model")
        if not model or not texts:
            raise ConfigError(f"the file contains no tokenizer: {REMEDY}")
        words = _words(model, _text(values, "tokenizer.ggml.pre"))
        special = gguf.special_ids(values, len(texts))
        if not words.has_bos and b"tokenizer.ggml.bos_token_id" not in values:
            special.pop("bos", None)
        kinds = _kinds(header, special)
        left, right = _stripped(values, words, kinds, texts)
        lowercase = _flag(values, "normalizer.lowercase", model == "bert")
        return cls(
            model=model,
            words=words,
            texts=texts,
            kinds=kinds,
            merges=_merges(header.merges),
            scores=header.scores or [0.0] * len(texts),
            special=special,
            ends=gguf.ends(values, header.tokens),
            adds_bos=_flag(values, "add_bos_token", words.add_bos or model == "llama") or words.needs_bos,
            adds_eos=_flag(values, "add_eos_token", model == "t5"),
            adds_space=model in ("llama", "t5") and _flag(values, "add_space_prefix", model == "llama"),
            merges_spaces=_flag(values, "remove_extra_whitespaces", False),
            characters=header.characters,
            lowercase=lowercase,
            strips_accents=_flag(values, "normalizer.strip_accents", lowercase),
            left_stripped=left,
            right_stripped=right,
        )

    def is_added(self, id: int) -> bool:
        """Return whether a token is extracted from a text before the text is divided into words."""
        return self.kinds[id] in _ADDED

    def is_special(self, id: int) -> bool:
        """Return whether a token is not shown in texts, and not extracted from texts that are taken literally."""
        return self.kinds[id] in _SPECIAL


def _flag(values: Mapping[bytes, object], name: str, default: bool) -> bool:
    value = values.get(f"tokenizer.ggml.{name}".encode())
    return value if isinstance(value, bool) else default


def _text(values: Mapping[bytes, object], name: str) -> str:
    value = values.get(name.encode())
    return value.decode(errors="replace") if isinstance(value, bytes) else ""


def _words(model: str, pre: str) -> Words:
    """Return how texts are divided into words.

    Raises:
        ConfigError: the kind of tokenizer is not supported, or llama.cpp does not know the pre-tokenizer.
    """
    if model not in MODELS:
        raise ConfigError(
            f"this handler does not support its kind of tokenizer (tokenizer.ggml.model is {model!r}, not one of "
            f"{', '.join(MODELS)}): {REMEDY}"
        )
    name = {"gpt2": pre, "gemma4": "gemma4", "whitespace": "whitespace"}.get(model, "")
    if name not in WORDS or (name == "whitespace" and model != name):
        raise ConfigError(
            f"this handler does not know how its tokenizer divides texts (tokenizer.ggml.pre is {pre!r}): {REMEDY}"
        )
    return WORDS[name]


MODELS = ("gpt2", "llama", "gemma4", "bert", "t5", "whitespace")
"""Kinds of tokenizers that are supported, as in `tokenizer.ggml.model`."""


def _texts(tokens: Sequence[bytes]) -> list[str]:
    """Return the texts of tokens.

    Raises:
        ConfigError: a token is not text, or two tokens have the same text.
    """
    texts = list[str]()
    for id, token in enumerate(tokens):
        try:
            texts.append(token.decode() or f"[EMPTY_{id}]")
        except UnicodeDecodeError:
            raise ConfigError(f"token {id} in its vocabulary is not valid UTF-8: {REMEDY}") from None
    if len(set(texts)) < len(texts):
        ids: dict[str, int] = {}
        twice = next((id, text) for id, text in enumerate(texts) if ids.setdefault(text, id) != id)
        raise ConfigError(
            f"tokens {ids[twice[1]]} and {twice[0]} in its vocabulary have the same text {twice[1]!r}, so llama.cpp "
            "cannot load the file: use another file of the model"
        )
    return texts


def _merges(merges: Iterable[bytes]) -> list[tuple[str, str]]:
    """Return the merges as pairs of tokens, each of them once."""
    pairs = dict[tuple[str, str], None]()
    for merge in merges:
        text = merge.decode(errors="replace")
        split = text.find(" ", 1)
        if split > 0:
            pairs[text[:split], text[split + 1 :]] = None
    return list(pairs)


# -- kinds of tokens, which llama.cpp corrects by their texts ----------------------------------------------------------


SHOWN = {b"<|channel|>", b"<|message|>", b"<|start|>", b"<|constrain|>"}
"""Texts of Harmony's tokens, which are visible."""
_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")
"""Texts of tokens of Phi 3 that do not take the spaces after them."""


def _kinds(header: gguf.TokenizerHeader, special: Mapping[str, int]) -> list[TokenType]:
    """Return the type of each token. The texts of known control tokens override the types in the header."""
    known = {kind.value: kind for kind in TokenType}
    numbers = header.kinds or [TokenType.NORMAL] * len(header.tokens)
    kinds = [known.get(number, TokenType.UNUSED) for number in numbers[: len(header.tokens)]]
    control = gguf.control_texts(special)
    present = {text for text in header.tokens if text in gguf.END_TEXTS}
    exceptions = gguf.end_exceptions(present)
    for id, text in enumerate(header.tokens):
        if text in control:
            kinds[id] = TokenType.CONTROL
        if text in SHOWN or (text in exceptions and text != b"</s>"):
            kinds[id] = TokenType.USER_DEFINED
        elif text in exceptions:
            kinds[id] = TokenType.NORMAL
    return kinds


def _added(kinds: Sequence[TokenType]) -> Set[int]:
    return {id for id, kind in enumerate(kinds) if kind in _ADDED}


def _stripped(
    values: Mapping[bytes, object], words: Words, kinds: Sequence[TokenType], texts: Sequence[str]
) -> tuple[Set[int], Set[int]]:
    """Return the ids of the tokens that take the spaces in front of them, and of those that take the spaces after them.

    The header does not contain this, so llama.cpp knows it by the model's name.
    """
    ids = {text: texts.index(text) for text in ("<mask>", "[MASK]", "</s>", *_NOT_STRIPPED) if text in texts}
    architecture, name = _text(values, "general.architecture"), _text(values, "general.name").lower()
    if words.is_stripped or any(part in architecture for part in ("nomic-bert-moe", "jina-bert-v3")):
        return {ids["<mask>"]} if "<mask>" in ids else set(), set()
    if "phi-3" in name or "phi3" in name:
        excluded = {ids[text] for text in _NOT_STRIPPED if text in ids}
        return set(), _added(kinds) - excluded | ({ids["</s>"]} if "</s>" in ids else set())
    if "modern-bert" in name:
        return {ids["[MASK]"]} if "[MASK]" in ids else set(), set()
    return set(), set()
