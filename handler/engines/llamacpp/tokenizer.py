"""Builds the tokenizer.json of a GGUF file, which gives the same ids as llama.cpp (src/llama-vocab.cpp, b11434)."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from handler.core.errors import ConfigError
from handler.engines.llamacpp.splits import Split, older, steps
from handler.engines.llamacpp.vocabulary import REMEDY, GgufVocabulary, TokenType

_SPACE = "▁"  # SentencePiece's space
_LETTERS = [*map(chr, range(0x21, 0x7F)), *map(chr, range(0xA1, 0xAD)), *map(chr, range(0xAE, 0x100))]
_LETTERS += [chr(0x100 + number) for number in range(256 - len(_LETTERS))]
"""GPT-2's characters for the 256 bytes."""
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]

Json = dict[str, Any]


def tokenizer_json(gguf: GgufVocabulary) -> Json:
    """Return the content of tokenizer.json.

    Raises:
        ConfigError: the vocabulary contradicts itself.
    """
    parts = _BUILDERS.get(gguf.model, _byte_pairs)(gguf)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(gguf),
        "post_processor": _post_processor(gguf),
        **parts,
    }


def _added_tokens(gguf: GgufVocabulary) -> list[Json]:
    """Return the tokens that are extracted from a text before it is divided into words."""
    return [
        {
            "id": id,
            "content": gguf.texts[id],
            "single_word": False,
            "lstrip": id in gguf.left_stripped,
            "rstrip": id in gguf.right_stripped,
            "normalized": False,
            "special": gguf.is_special(id),
        }
        for id in range(len(gguf.texts))
        if gguf.is_added(id)
    ]


def _post_processor(gguf: GgufVocabulary) -> Json | None:
    is_bert = gguf.model == "bert"
    names = ("bos", "seperator") if is_bert else ("bos",) * gguf.adds_bos + ("eos",) * gguf.adds_eos
    before = [gguf.special[name] for name in names[:1] if name == "bos" and name in gguf.special]
    after = [gguf.special[name] for name in names if name != "bos" and name in gguf.special]
    if not before and not after:
        return None

    def sequence(name: str, number: int = 0) -> list[Json]:
        def tokens(ids: Iterable[int]) -> list[Json]:
            return [{"SpecialToken": {"id": gguf.texts[id], "type_id": number}} for id in ids]

        begin = [] if is_bert and number else tokens(before)
        return [*begin, {"Sequence": {"id": name, "type_id": number}}, *tokens(after)]

    texts = {id: gguf.texts[id] for id in (*before, *after)}
    return {
        "type": "TemplateProcessing",
        "single": sequence("A"),
        "pair": [*sequence("A"), *sequence("B", int(is_bert))],
        "special_tokens": {text: {"id": text, "ids": [id], "tokens": [text]} for id, text in texts.items()},
    }


def _model(vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], **options: Any) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": vocabulary,
        "merges": [list(pair) for pair in merges],
    }


def _sequence(kind: str, items: Sequence[Json]) -> Json | None:
    if len(items) < 2:
        return items[0] if items else None
    return {"type": "Sequence", kind: list(items)}


def _replace(pattern: Json, content: str) -> Json:
    return {"type": "Replace", "pattern": pattern, "content": content}


_ESCAPE = _replace({"String": " "}, _SPACE)


# -- BPE: the file lists the merges ------------------------------------------------------------------------------------


def _byte_pairs(gguf: GgufVocabulary) -> Json:
    words = gguf.words
    vocabulary = {text: id for id, text in enumerate(gguf.texts)}
    merges = _merges(gguf, vocabulary)
    if not words.spaces:
        model = _model(vocabulary, merges, ignore_merges=words.ignore_merges)
        letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        splits = [*steps(words.splits), letters, *_without(letter for letter in _LETTERS if letter not in vocabulary)]
        return {"normalizer": None, "pre_tokenizer": _sequence("pretokenizers", splits), "decoder": letters} | {
            "model": model
        }
    is_complete = all(byte in vocabulary for byte in _BYTES)
    return {
        "normalizer": _sequence("normalizers", _NORMALIZERS[words.spaces]),
        "pre_tokenizer": _sequence("pretokenizers", steps(words.splits)),
        "decoder": _decoder(is_prefixed=words.spaces == "words"),
        "model": _model(vocabulary, merges, byte_fallback=is_complete),
    }


_NORMALIZERS: dict[str, list[Json]] = {
    "escaped": [_ESCAPE],
    "words": [_ESCAPE, _replace({"Regex": rf"(?:\A|(?<=\n))(?=[^\n{_SPACE}])"}, _SPACE)],
    "removed": [{"type": "Lowercase"}],
}
"""The normalizers of the ways to write spaces."""


def _merges(gguf: GgufVocabulary, vocabulary: Mapping[str, int]) -> Sequence[tuple[str, str]]:
    """Return the merges.

    Raises:
        ConfigError: a part of a merge or its result is not a token.
    """
    for left, right in gguf.merges:
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            texts = f"{left!r}, {right!r} and {left + right!r}"
            raise ConfigError(f"it merges tokens, but its vocabulary does not contain all of {texts}: {REMEDY}")
    return gguf.merges


def _without(letters: Iterable[str]) -> list[Json]:
    """Return a step that removes characters that are no tokens, as llama.cpp does."""
    text = "".join(letters)
    if not text:
        return []
    pattern = {"Regex": "[" + "".join(f"\\x{{{ord(letter):X}}}" for letter in text) + "]"}
    return [{"type": "Split", "pattern": pattern, "behavior": "Removed", "invert": False}]


# -- SentencePiece: merges by the scores of their results --------------------------------------------------------------


def _sentence_piece(gguf: GgufVocabulary) -> Json:
    vocabulary = {text: id for id, text in enumerate(gguf.texts)}
    if missing := [byte for byte in _BYTES if byte not in vocabulary]:
        raise ConfigError(f"its vocabulary has no token {missing[0]}, which its tokenizer needs: {REMEDY}")
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if gguf.adds_space else []
    return {
        "normalizer": _sequence("normalizers", [*prefix, _ESCAPE]),
        "pre_tokenizer": None,
        "decoder": _decoder(is_prefixed=gguf.adds_space),
        "model": _model(vocabulary, _scored_merges(gguf, vocabulary), byte_fallback=True),
    }


def _scored_merges(gguf: GgufVocabulary, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of tokens whose joined text is a token, by its score.

    llama.cpp merges the leftmost of equal pairs. If two pairs of the same token overlap, the left one is the one whose
    second part also begins the token.
    """
    merges = list[tuple[float, int, bool, str, str]]()
    for id, text in enumerate(gguf.texts):
        score = gguf.scores[id]
        for split in range(1, len(text)):
            left, right = text[:split], text[split:]
            if left in vocabulary and right in vocabulary:
                merges.append((-score, id, not text.startswith(right), left, right))
    merges.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in merges]


# -- BERT: the longest token at each position of a word ----------------------------------------------------------------


_NO_UNKNOWN = f"its vocabulary has no token for unknown words, which its tokenizer needs: {REMEDY}"
_LONGEST_WORD = 256  # characters of a word; a longer one is unknown, because its tokens take quadratic time
_CHINESE = (
    r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2B73F}\x{2B740}-\x{2B81F}\x{2B920}-\x{2CEAF}"
    r"\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}"
)


def _word_pieces(gguf: GgufVocabulary) -> Json:
    """Return the parts of a tokenizer like BERT's.

    llama.cpp removes all combining characters, not only accents, and all but the first letter of a syllable in Hangul.
    """
    normalizers = [_replace({"Regex": r"[[\p{Cc}\p{Cf}\p{Co}\x{FFFD}]&&\S]"}, "")]
    if gguf.strips_accents:
        normalizers.append({"type": "NFD"})
        normalizers.append(
            _replace(
                {"Regex": older(r"\p{M}") + r"|(?<=[\x{1100}-\x{1112}])[\x{1161}-\x{1175}][\x{11A8}-\x{11C2}]?"}, ""
            )
        )
    if gguf.lowercase:
        normalizers.append({"type": "Lowercase"})
    unknown = gguf.special.get("unknown")
    if unknown is None:
        raise ConfigError(_NO_UNKNOWN)
    alone = Split(older(r"\p{P}") + rf"|[$+<=>^`|~{_CHINESE}]")
    space = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "always", "split": False}
    return {
        "normalizer": _sequence("normalizers", normalizers),
        "pre_tokenizer": _sequence("pretokenizers", [*steps([Split(r"\s+", "Removed"), alone]), space]),
        "decoder": _decoder(is_prefixed=True),
        "model": {
            "type": "WordPiece",
            "unk_token": gguf.texts[unknown],
            "continuing_subword_prefix": "",
            "max_input_chars_per_word": _LONGEST_WORD,
            "vocab": {text: id for id, text in enumerate(gguf.texts)},
        },
    }


# -- T5: the division with the highest sum of scores -------------------------------------------------------------------


def _unigrams(gguf: GgufVocabulary) -> Json:
    normal = [score for score, kind in zip(gguf.scores, gguf.kinds, strict=False) if kind is TokenType.NORMAL]
    unknown = gguf.special.get("unknown")
    if not normal:
        raise ConfigError(f"its vocabulary contains only special tokens: {REMEDY}")
    if unknown is None:
        raise ConfigError(_NO_UNKNOWN)
    # llama.cpp does not look for other tokens in words.
    fixed = {TokenType.NORMAL: None, TokenType.UNUSED: None, TokenType.USER_DEFINED: 0.0}
    scores = [
        (score if fixed[kind] is None else fixed[kind]) if kind in fixed else min(normal)
        for score, kind in zip(gguf.scores, gguf.kinds, strict=False)
    ]
    table = [{"type": "Precompiled", "precompiled_charsmap": base64.b64encode(gguf.characters).decode()}]
    return {
        "normalizer": _sequence("normalizers", [*(table if gguf.characters else []), *_spaces(gguf)]),
        "pre_tokenizer": None,
        "decoder": _decoder(is_prefixed=gguf.adds_space or gguf.merges_spaces),
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "byte_fallback": False,
            "vocab": [[text, score] for text, score in zip(gguf.texts, scores, strict=True)],
        },
    }


def _spaces(gguf: GgufVocabulary) -> list[Json]:
    """Return how the normalizer writes spaces."""
    if gguf.merges_spaces:
        return [
            _replace({"Regex": r"\A +| +\z"}, ""),
            _replace({"Regex": " +"}, _SPACE),
            {"type": "Prepend", "prepend": _SPACE},
        ]
    return [_ESCAPE, _replace({"Regex": rf"\A(?={_SPACE}*[^{_SPACE}])"}, _SPACE if gguf.adds_space else "")]


_BUILDERS = {"llama": _sentence_piece, "bert": _word_pieces, "t5": _unigrams}


def _decoder(*, is_prefixed: bool) -> Json | None:
    steps: list[Json] = [_replace({"String": _SPACE}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if is_prefixed:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _sequence("decoders", steps)
