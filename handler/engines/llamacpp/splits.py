r"""How llama.cpp divides a text into words before it merges the characters of each word (src/llama-vocab.cpp, b11434).

`tokenizer.ggml.pre` in a GGUF file names the way. Where llama.cpp differs from the model's own tokenizer.json, the
patterns follow llama.cpp, because it defines the ids that the model gets. They are in the syntax of Oniguruma, which
`tokenizers` uses:

* llama.cpp's tables are of Unicode 15, so characters of Unicode 16 are neither letters, digits nor symbols.
* Contractions such as `'LL` are found in ASCII only, not with `ſ`.
* In patterns with explicit characters, every space of Unicode is `\s` alone.
* No pattern takes more than linear time, although some of llama.cpp's and of the models' own do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_NEWER = (
    r"\x{897}\x{1B4E}-\x{1B4F}\x{1B7F}\x{1C89}-\x{1C8A}\x{2427}-\x{2429}\x{31E4}-\x{31E5}\x{A7CB}-\x{A7CD}"
    r"\x{A7DA}-\x{A7DC}\x{105C0}-\x{105F3}\x{10D40}-\x{10D8F}\x{10EC2}-\x{10EFC}\x{11380}-\x{113E2}\x{116D0}-\x{116E3}"
    r"\x{11BC0}-\x{11BF9}\x{11F5A}\x{13460}-\x{143FA}\x{16100}-\x{16139}\x{16D40}-\x{16D79}\x{18CFF}\x{1CC00}-\x{1CEB3}"
    r"\x{1E5D0}-\x{1E5FF}\x{1F8B2}-\x{1F8C1}\x{1FA89}-\x{1FA8F}\x{1FABE}\x{1FAC6}\x{1FADC}-\x{1FADF}\x{1FAE9}"
    r"\x{1FBCB}-\x{1FBEF}"
)
"""Characters that Oniguruma's tables have and llama.cpp's do not."""
_CATEGORY = re.compile(r"\\p\{[LMNPS]\}")


class Split(NamedTuple):
    """A step that divides texts.

    Attributes:
        pattern: a regular expression in Oniguruma's syntax. Matches, and the texts between them, become words.
        behavior: `Isolated`, or the name of another behavior in tokenizer.json.
    """

    pattern: str
    behavior: str = "Isolated"


class Words(NamedTuple):
    """How texts are divided into words, and words into tokens.

    Attributes:
        splits: the steps, each of which divides the words of the step before.
        ignore_merges: whether a word that is a token is not merged from its characters.
        add_bos: whether the default is to begin a text with the BOS token.
        has_bos: whether there is a BOS token if the header declares none.
        spaces: how a space is written: "" for GPT-2's characters for bytes, or `escaped` for SentencePiece's character
            without a prefix, or `words` for SentencePiece's character in front of each word, or `removed`.
        needs_bos: whether a text begins with the BOS token even if the header says that it does not.
        is_stripped: whether the token `<mask>` takes the spaces in front of it.
    """

    splits: tuple[Split, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    has_bos: bool = True
    spaces: str = ""
    needs_bos: bool = False
    is_stripped: bool = False


def older(pattern: str) -> str:
    """Return a pattern whose categories contain only the characters that llama.cpp knows."""
    return _CATEGORY.sub(lambda category: f"[{category[0]}&&[^{_NEWER}]]", pattern)


def _steps(*patterns: str | Split) -> tuple[Split, ...]:
    splits = (Split(pattern) if isinstance(pattern, str) else pattern for pattern in patterns)
    return tuple(split._replace(pattern=older(split.pattern)) for split in splits)


_CONTRACTION = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_PUNCTUATED = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
_ANY_CASE = r"[\p{L}&&[^a-z]]"  # written for upper, title, modifier and other letters
_ANY_LOWER = r"[\p{L}&&[^A-Z]]"
_EAST = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}&&\S]+"
_KANJI = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+"
_HAN = (
    r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2B73F}\x{2B740}-\x{2B81F}\x{2B820}-\x{2CEAF}"
    r"\x{2CEB0}-\x{2EBEF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}"
)
_LATIN = (
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}"
    r"\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}"
    r"\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}"
    r"\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}"
    r"\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}"
    r"\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}"
    r"\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}"
    r"\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}"
    r"\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}"
    r"\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}"
    r"\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}"
    r"\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}"
    r"\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}"
)


def _words(letters: str, digits: str, others: str = _OTHERS, spaces: str = _SPACES) -> str:
    """Return a pattern like GPT-4's."""
    return rf"{_CONTRACTION}|{letters}|{digits}|{others}|{spaces}"


def _cased(upper: str, lower: str, contraction: str, digits: str) -> str:
    """Return a pattern like GPT-4o's, which divides words where the case changes."""
    begin = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{begin}{upper}*{lower}+{contraction}|{begin}{upper}+{lower}*{contraction}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_GPT2 = r"'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT4_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = _words(_GPT4_LETTERS, r"\p{N}{1,3}")
_QWEN2 = _words(_GPT4_LETTERS, r"\p{N}")
_JAIS2 = (
    r"\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)"
    r"|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
)
_DEEPSEEK3 = rf"{_PUNCTUATED}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_LINES = r"[^\n]+|\n+"
_YOUTU = (
    r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-\x{303F}\x{FE30}-\x{FE4F}]+|[ㄅ-ㄯ]+|" + _KANJI,
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+(?:{_CONTRACTION})?|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
)
_KIMI = rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+(?:{_CONTRACTION})?|\p{{N}}{{1,3}}|{_OTHERS}|{_SPACES}"
_DIGITS_FROM_RIGHT = (  # the first group stays with the text in front of it
    Split(r"\p{N}+", "MergedWithPrevious"),
    Split(r"\A[^\p{N}]*\p{N}{1,3}(?=(?:\p{N}{3})*\z)|\p{N}{3}"),
)
_SUPERBPE = (
    Split(r"\p{N}+"),
    Split(r"(?<![0-9])[0-9]{1,2}(?=(?:[0-9]{3})+(?![0-9]))", "MergedWithPrevious"),
    Split(r"(?<![0-9])(?=(?:[0-9]{3})+(?![0-9]))"),
    Split(r"[0-9]{3}(?=[0-9])"),
)
_ASIAN = (
    "[一-鿿㐀-䶿\\x{8C48}-\\x{FAFF}\\x{3040}-\\x{30FF}\\x{FF65}-\\x{FF9F}\\x{2F00}-\\x{2FDF}\\x{E40}-\\x{E7F}"
    "\\x{E80}-\\x{EFF}\\x{1780}-\\x{17FF}\\x{1000}-\\x{109F}\\x{AA60}-\\x{AA7F}\\x{A9E0}-\\x{A9FF}\\x{AC00}-\\x{D7AF}"
    "\\x{1100}-\\x{11FF}]+"
)
_OPTIONAL = rf"(?:{_CONTRACTION})?"
_GPT4O = _cased(_ANY_CASE, _ANY_LOWER, _OPTIONAL, r"\p{N}{1,3}")
_GPT2_DIGITS = _steps(r"\p{N}", _GPT2)
_CHAMELEON = _steps(
    "<sentinel:[0-9]+>",
    "IMGIMG[A-I]{1,4}Z",
    r"[\t\n]|    |  ",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)

_GPT2_WORDS = Words(_steps(_GPT2))
_LLAMA3_WORDS = Words(_steps(_LLAMA3), ignore_merges=True, add_bos=True)
_PLAIN_LLAMA3 = Words(_steps(_LLAMA3))
_QWEN2_WORDS = Words(_steps(_QWEN2))
_DEEPSEEK3_WORDS = Words(_steps(r"\p{N}{1,3}", _KANJI, _DEEPSEEK3))
_BAILING = Words(_steps(_words(_GPT4_LETTERS, r"\p{N}", spaces=r"\s*[\r\n]|\s+(?!\S)|\s+")))
_GEMMA4 = Words(_steps(_LINES), spaces="escaped", needs_bos=True)

WORDS = {
    "": (_DEFAULT := Words(_steps(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    "default": _DEFAULT,
    "minicpm5": Words(_steps(r"\p{N}{1,3}", _words(_GPT4_LETTERS, r"\p{N}+")), ignore_merges=True),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        _LLAMA3_WORDS,
    ),
    "deepseek-llm": Words(
        _steps(
            r"[\r\n]",
            rf"\s?[{_LATIN}]+",
            r"\s?[!-/:-~！-／：-～‘-‟\x{3001}-\x{3002}]+",
            r"\s+\z",
            _EAST,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Words(_steps(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"), _DEEPSEEK3_WORDS),
    "spark2_5": Words(_steps(r"\p{N}{1,3}", _KANJI, _PUNCTUATED + r"| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    "youtu": Words(_steps(*_YOUTU), ignore_merges=True),
    "falcon": Words(_steps(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    **dict.fromkeys(
        (
            *("mpt", "gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "a.x-4.0", "mellum", "modern-bert"),
            *("jina-v1-en", "roberta-bpe", "olmo", "jais", "exaone4", "trillion", "granite-docling"),
        ),
        _GPT2_WORDS,
    ),
    **dict.fromkeys(("jina-v2-es", "jina-v2-de", "jina-v2-code"), _GPT2_WORDS._replace(is_stripped=True)),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
        Words(_GPT2_DIGITS),
    ),
    "jais-2": Words(_steps(_words(_GPT4_LETTERS, r"\p{N}{1,3}", spaces=_JAIS2))),
    "gemma4": _GEMMA4,
    "granite-embed-multi-311m": _GEMMA4,
    "mmbert": Words(_steps(_LINES, "▁[^▁]*"), spaces="words", is_stripped=True),
    "sarvam-moe": Words(_steps(_LINES), spaces="escaped"),
    "whitespace": Words((Split(r"\s+", "Removed"),), spaces="removed"),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "stablelm2", "megrez", "hunyuan", "solar-open", "grok-2"),
        _QWEN2_WORDS,
    ),
    "qwen35": Words(_steps(_words(r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"))),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _PLAIN_LLAMA3),
    "chatglm-bpe": _PLAIN_LLAMA3._replace(has_bos=False),
    **dict.fromkeys(("glm4", "glm5"), _PLAIN_LLAMA3._replace(has_bos=False, ignore_merges=True)),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), Words(_steps(_BLOOM))),
    "viking": Words(_steps(_BLOOM, r"\p{N}")),
    "tekken": Words(_steps(_cased(_ANY_CASE, _ANY_LOWER, "", r"\p{N}")), ignore_merges=True, add_bos=True),
    "exaone-moe": Words(
        _steps(
            _words(
                r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                r"\p{N}",
                r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
                r"\s*[\r\n]|\s+(?!\S)|\s+",
            )
        )
    ),
    "chameleon": Words(_CHAMELEON, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), Words(_steps(_GPT4O))),
    "granite-embed-multi-97m": Words(
        _steps(_cased(r"[[\p{L}\p{M}]&&[^a-z]]", r"[[\p{L}\p{M}]&&[^A-Z]]", _OPTIONAL, r"\p{N}{1,3}")),
        ignore_merges=True,
    ),
    **dict.fromkeys(
        ("tiny_aya", "cohere2moe"),
        Words(_steps(*_DIGITS_FROM_RIGHT, _cased(r"[\p{L}\p{M}]", r"[\p{L}\p{M}]", _OPTIONAL, r"\p{N}{1,3}"))),
    ),
    "superbpe": Words(_steps(*_SUPERBPE)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "seed-coder": Words(_steps(_words(_GPT4_LETTERS, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+"))),
    "kimi-k2": Words(_steps(_KIMI)),
    "ufakzeka": Words(_steps(rf"{_GPT4_LETTERS}|\p{{N}}|{_OTHERS}|{_SPACES}")),
    "afmoe": Words(_steps(*_DIGITS_FROM_RIGHT, _ASIAN, _DEEPSEEK3)),
    "laguna": Words(_steps(_LINES, _QWEN2)),
}
"""Maps each value of `tokenizer.ggml.pre` that llama.cpp knows to its meaning. "" stands for a missing value."""


def steps(words: Sequence[Split]) -> list[dict[str, object]]:
    """Return splits in the form of the pre-tokenizers in tokenizer.json."""
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}
        for pattern, behavior in words
    ]
