"""Reads parts of the header of a GGUF file.

The `gguf` package parses the whole header with 50,000 tokens and their merges, which takes 1.8 s of a 3 s startup. The
format is described in github.com/ggml-org/ggml, docs/gguf.md. Versions 2 and 3, little-endian, are supported.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from handler.core.text_files import placeholder

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_STRING = 1 << 26  # bytes; a chat template has a few thousand
_MAX_NUMBERS = 1 << 12  # maximum numbers in a list to keep: enough for one per layer, but not for one per token
_MAX_ITEMS = 1 << 21  # maximum length of a list of texts; the largest have half a million
_MAX_TEXTS = 1 << 27  # maximum bytes of such a list; the largest have a few millions
_MAX_HEADER = 1 << 27  # maximum bytes of a header; the largest have 16 MiB
_MAX_VALUES, _MAX_TENSORS = 1 << 16, 1 << 18  # maximum numbers; the largest models have some ten thousand tensors
_MAX_PARTS = (1 << 16) - 1  # llama.cpp's own limit
_PART = re.compile("-[0-9]{5}-of-")  # in the name of a file of a model in several parts
_ARCHITECTURE, _TYPE = b"general.architecture", b"general.type"
_BESIDE: Mapping[object, str] = {kind.encode(): kind for kind in ("mmproj", "adapter", "imatrix")}
_TOKENIZER, _TOKENS = b"tokenizer.", b"tokenizer.ggml.tokens"
_HEADS = frozenset({b"cls.weight", b"cls.output.weight"})
"""Names of the matrices with which llama.cpp scores texts. A model has one of them, or both."""
_NEEDED = {_ARCHITECTURE: "model", _TOKENS: "tokenizer"}
_MODEL, _MERGES = b"tokenizer.ggml.model", b"tokenizer.ggml.merges"
_SCORES, _KINDS = b"tokenizer.ggml.scores", b"tokenizer.ggml.token_type"
_CHARACTERS = b"tokenizer.ggml.precompiled_charsmap"
_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep", "mask": "mask"}
"""Maps the name of a token in `tokenizer.ggml.NAME_token_id` to its name in tokenizer_config.json."""
_MAX_DIMENSIONS = 4  # ggml's own limit
_PARTS, _PART_NUMBER, _ALIGNMENT = b"split.count", b"split.no", b"general.alignment"
DEFAULT_IDS: Mapping[object, Mapping[str, int]] = {
    b"llama": {"bos": 1, "eos": 2, "unknown": 0},
    b"gpt2": {"bos": 11, "eos": 11},
    b"whitespace": {"bos": 11, "eos": 11},
    b"bert": {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
    b"t5": {"eos": 1, "unknown": 2, "padding": 0},
    b"plamo2": {"bos": 1, "eos": 2, "unknown": 0, "padding": 3},
}
"""The ids of special tokens that the header does not declare, by `tokenizer.ggml.model`."""
_END_NAMES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Names of tokens that end a response. The last three are between files."""
END_TEXTS = {
    *(b"<|eot_id|>", b"<|im_end|>", b"<|end|>", b"<|return|>", b"<|call|>", b"<|flush|>", b"<|calls|>"),
    *(b"<end_of_turn>", b"<|endoftext|>", b"</s>", b"<|eom_id|>", b"<EOT>", b"_<EOT>", b"[EOT]", b"[EOS]"),
    *(b"<|end_of_text|>", b"<end_of_utterance>", b"<eos>", b"<turn|>", b"<|tool_response>", b"[e~["),
    "<｜end▁of▁sentence｜>".encode(),
}
"""Texts of tokens that end a response even if the header does not declare them as end tokens."""
_FIM_ENDS = ("fim_pad", "fim_rep", "fim_sep")
FIM_TEXTS = {
    "fim_pre": {
        *(b"<|fim_prefix|>", b"<fim-prefix>", b"<fim_prefix>", b"<PRE>", b"<|code_prefix|>", b"<|prefix|>"),
        *("<｜fim▁begin｜>".encode(), "▁<PRE>".encode()),
    },
    "fim_suf": {
        *(b"<|fim_suffix|>", b"<fim-suffix>", b"<fim_suffix>", b"<SUF>", b"<|code_suffix|>", b"<|suffix|>"),
        *("<｜fim▁hole｜>".encode(), "▁<SUF>".encode()),
    },
    "fim_mid": {
        *(b"<|fim_middle|>", b"<fim-middle>", b"<fim_middle>", b"<MID>", b"<|code_middle|>", b"<|middle|>"),
        *("<｜fim▁end｜>".encode(), "▁<MID>".encode()),
    },
    "fim_pad": {b"<|fim_pad|>", b"<fim-pad>", b"<fim_pad>", b"<PAD>", b"[PAD]"},
    "fim_rep": {b"<|fim_repo|>", b"<|repo_name|>", b"<fim-repo>", b"<REPO>", b"<reponame>"},
    "fim_sep": {b"<|file_sep|>"},
}
"""Texts of the tokens around the parts of a file, by name. They count if the header declares no such token."""
_OLD_NAMES = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
_KEYS = {name: name for name in (*_SPECIAL, *_END_NAMES)} | _OLD_NAMES | {name: name for name in FIM_TEXTS}
"""The names of special tokens in the keys of a header."""


class TensorType(NamedTuple):
    """A type of tensors: its name, the number of weights in a block, and the size of a block in bytes."""

    name: str
    weights: int
    size: int


TYPES: Mapping[int, TensorType] = {
    number: TensorType(*values)
    for number, values in {
        0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
        16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
        24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
        29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
    }.items()
}  # fmt: skip
"""The types of tensors in llama.cpp b11434, by their numbers in ggml."""


def is_gguf_name(path: Path | str) -> bool:
    """Return whether a file name has the suffix of GGUF files. Some file systems and uploaders write it in capitals."""
    return str(path).lower().endswith(".gguf")


def context_length(path: Path) -> int | None:
    """Return the context length of the model in tokens, or None if the file does not contain it.

    Raises:
        ValueError: if the file is not a GGUF file of a supported version, or if its header is broken.
    """
    with path.open("rb") as file:
        return find_context_length(_pairs(file, _begin(file)[1]))


def find_context_length(values: Iterable[tuple[bytes, object]]) -> int | None:
    """Return the context length among the key-value pairs of a header, or None if they do not contain it."""
    for key, value in values:
        if key.endswith(b".context_length") and isinstance(value, int):
            return value if value > 0 else None
    return None


def end_ids(path: Path) -> frozenset[int]:
    """Return the IDs of the tokens that end a response, as llama.cpp does (src/llama-vocab.cpp, `special_eog_ids`).

    These are the end-of-text, end-of-turn and end-of-message tokens in the header, the tokens between files, and all
    tokens with a text in `END_TEXTS`. The end-of-text token alone is not enough, because chat templates often end a
    turn with another token.

    Raises:
        ValueError: if the file is not a GGUF file of a supported version, or if its header is broken.
    """
    tokens: list[bytes] = []
    return ends(read_values(path, tokens), tokens)


def ends(values: Mapping[bytes, object], tokens: Sequence[bytes]) -> frozenset[int]:
    """Return the IDs of the tokens that end a response; see `end_ids`.

    Args:
        values: the key-value pairs of the header.
        tokens: the texts of all tokens, by ID.
    """
    special = special_ids(values, len(tokens))
    texts = END_TEXTS.union(*(FIM_TEXTS[name] for name in _FIM_ENDS if name not in special))
    ids = [special[name] for name in _END_NAMES if name in special]
    ids += [id for id, text in enumerate(tokens) if text in texts]
    no_ends = end_exceptions({tokens[id] for id in ids})
    return frozenset(id for id in ids if tokens[id] not in no_ends)


def end_exceptions(texts: Set[bytes]) -> Set[bytes]:
    """Return the texts of end tokens that do not end a response because of other end tokens."""
    exceptions = set[bytes]()
    if texts >= {b"<|end|>", b"<|return|>"} and texts & {b"<|call|>", b"<|calls|>"}:
        exceptions.add(b"<|end|>")  # Harmony's: the end of a message, not of the response
    if texts >= {b"<|end|>", b"<|flush|>"} and texts & {b"<|call|>", b"<|calls|>"}:
        exceptions.add(b"<|end|>")  # Solar Open's
    if texts & {b"<|tool_response>", b"<|plamo:eos|>"}:
        exceptions.add(b"</s>")  # a word of Gemma 4's vocabulary and of PLaMo's
    return exceptions


def control_texts(special: Collection[str]) -> Set[bytes]:
    """Return the texts of tokens that are control tokens even if the header says otherwise.

    Args:
        special: names of the special tokens that the header declares.
    """
    return END_TEXTS.union(*(texts for name, texts in FIM_TEXTS.items() if name not in special))


def special_ids(values: Mapping[bytes, object], num_tokens: int) -> dict[str, int]:
    """Return the IDs of special tokens, by NAME in `tokenizer.ggml.NAME_token_id`, with llama.cpp's defaults."""
    model = values.get(_MODEL)
    defaults = DEFAULT_IDS.get(model, {}) if isinstance(model, bytes) else {}
    declared = {name: values.get(f"tokenizer.ggml.{key}_token_id".encode()) for name, key in _KEYS.items()}
    valid = {name: id for name, id in declared.items() if isinstance(id, int) and 0 <= id < num_tokens}
    ids = {**defaults, **valid}
    return {name: id for name, id in ids.items() if id < num_tokens}


_NO_POOLING, _RANK = 0, 4  # values of pooling_type
_ENCODERS = (b"bert", b"modern-bert", b"nomic-bert", b"nomic-bert-moe", b"neo-bert", b"jina-bert-v2", b"jina-bert-v3",
             b"eurobert", b"gemma-embedding", b"llama-embed")  # fmt: skip
"""Architectures of models that compute embeddings and generate no text."""


def pooled_task(path: Path) -> str:
    """Return the task of a model that does not generate text, according to the values before the tokenizer's.

    Returns:
        "rerank", "text-embedding", or "" for a model that generates text, and for a broken file.
    """
    task = ""
    with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
        for key, value in _pairs(file, _begin(file)[1]):
            if key.startswith(_TOKENIZER):
                break
            if key == _ARCHITECTURE and value in _ENCODERS:
                task = task or "text-embedding"
            elif key.endswith(b".pooling_type") and isinstance(value, int) and value != _NO_POOLING:
                task = "rerank" if value == _RANK else "text-embedding"
    return task


def contents(path: Path) -> tuple[str, int]:
    """Return the kind of a file, and the number of files into which the model is split, according to the header.

    The kind is "model", or the llama.cpp name for a file that accompanies a model: "mmproj", "adapter" or "imatrix".

    Raises:
        ValueError: if the file is not a GGUF file of a supported version, or if its header is broken.
    """
    return contents_of(read_values(path))


def read_values(path: Path, tokens: list[bytes] | None = None) -> dict[bytes, object]:
    """Return the key-value pairs of the header. Append the texts of all tokens to `tokens`."""
    lists = None if tokens is None else {_TOKENS: tokens}
    with path.open("rb") as file:
        values = dict(_pairs(file, _begin(file)[1], lists))
    if tokens and not isinstance(tokens[0], bytes):
        raise ValueError(f"{path} is broken: {_TOKENS.decode()} is a list of another type")
    return values


def values_before_tokenizer(path: Path) -> dict[bytes, object]:
    """Return the key-value pairs before the tokenizer's, which are long. Projectors and adapters have no tokenizer.

    Raises:
        ValueError: if the file is not a GGUF file of a supported version, or if its header is broken.
    """
    with path.open("rb") as file:
        pairs = _pairs(file, _begin(file)[1])
        return dict(itertools.takewhile(lambda pair: not pair[0].startswith(_TOKENIZER), pairs))


def contents_of(values: Mapping[bytes, object]) -> tuple[str, int]:
    """Return the kind of a file, and the number of files of the model; see `contents`."""
    kind, parts = values.get(_TYPE), values.get(_PARTS)
    kind = kind if isinstance(kind, bytes) else None  # not a string, but a number or a list
    if values.get(_ARCHITECTURE) == b"clip":
        kind = b"mmproj"  # early projectors have no type
    return _BESIDE.get(kind, "model"), parts if type(parts) is int and parts else 1


def in_parts(parts: int, first: str) -> str:
    return (
        f"a model in {parts} parts: merge them with `llama-gguf-split --merge {first} merged.gguf`, or use "
        f"--engine llamacpp, which reads {first}"
    )


def check_complete(path: Path) -> Header:
    """Check that a file contains a complete model, and return its header.

    OpenVINO would read past the end of a truncated file, and either crash or use zeros as weights.

    Raises:
        ValueError: if the file is not a GGUF file, is not a model, is one of several parts, or is truncated or broken.
    """
    return _check_size(path, _check_whole)


def check_parts(first: Path) -> Header:
    """Check that a file and the other parts of its model, if there are several, are complete.

    llama.cpp itself finds the other parts by the name of the first one.

    Returns:
        The header of the first part, with the tensors of all parts.

    Raises:
        ValueError: if a part is missing, is truncated or broken, or if the file is not the first part of a model.
    """
    header = _check_size(first, _check_model)
    parts, tensors, has_head = contents_of(header.values)[1], [*header.tensors], header.has_head
    for path in _part_paths(first, parts)[1:]:
        if not path.is_file():
            raise ValueError(f"{path} is missing: the model has {parts} parts")
        other = _check_size(path)
        if contents_of(other.values)[1] != parts:
            raise ValueError(f"{path} does not belong to {first}, which has {parts} parts")
        tensors += other.tensors
        has_head = has_head or other.has_head
    return Header(header.values, tensors, has_head)


def size(first: Path, parts: int) -> int:
    """Return the size of a model in bytes. `first` is the path of its file, or of the first of its parts."""
    return sum(path.stat().st_size for path in _part_paths(first, parts))


def parts_pattern(name: str) -> str:
    """Return a pattern for the names of all parts of a model, or the name itself if it is not that of the first."""
    return re.sub("-00001(-of-[0-9]{5}[.][^./]+)$", r"-[0-9][0-9][0-9][0-9][0-9]\1", name)


def _part_paths(first: Path, parts: int) -> list[Path]:
    """Return the paths of all parts of a model.

    Raises:
        ValueError: if the name of the file is not that of the first part, or if the number of parts makes no sense.
    """
    if parts == 1:
        return [first]
    if not 0 < parts <= _MAX_PARTS:
        raise ValueError(f"{first} is broken: its header says that the model has {parts:,} parts")
    name = f"-00001-of-{parts:05}"
    if not first.stem.endswith(name):
        raise ValueError(f"{first} is not the first of {parts} parts: name the file *{name}.gguf, in their directory")
    return [
        first.with_name(f"{first.stem.removesuffix(name)}-{part:05}-of-{parts:05}{first.suffix}")
        for part in range(1, parts + 1)
    ]


def _check_size(path: Path, check: Callable[[Path, Mapping[bytes, object]], None] | None = None) -> Header:
    """Return the header of a file.

    Args:
        check: a function that checks the values of the header before the size is checked.

    Raises:
        ValueError: if the file is not a GGUF file, or is truncated or broken.
    """
    with path.open("rb") as file:
        num_tensors, num_values = _begin(file)
        values = dict(_pairs(file, num_values))
        if check is not None:
            check(path, values)
        tensors = [*_tensors(file, num_tensors)]
        last = max((offset + _size(shape, type) for _, shape, type, offset in tensors), default=0)
        alignment = values.get(_ALIGNMENT) or 32
        if not isinstance(alignment, int):
            raise ValueError(f"{path} is broken: its alignment is not a number")
        if not tensors and contents_of(values)[1] == 1:  # the first of several parts may contain no tensors
            raise ValueError(f"{path} contains no weights: its header describes no tensors")
        size, needed = path.stat().st_size, -(-file.tell() // alignment) * alignment + last
    if size < needed:
        raise ValueError(f"{path} is cut short: it has {size:,} bytes, but its header describes {needed:,}")
    return Header(values, [(shape, type) for _, shape, type, _ in tensors], _has_head(tensors))


def _check_whole(path: Path, values: Mapping[bytes, object]) -> None:
    kind, parts = contents_of(values)
    if kind == "model" and parts > 1:
        raise ValueError(f"{path} is part of {in_parts(parts, _first_of(path))}")
    _check_model(path, values)


def _check_model(path: Path, values: Mapping[bytes, object]) -> None:
    """Check the values in the header of a model, or of the first of its parts.

    Raises:
        ValueError: if the file is not a model, or a later part of a model.
    """
    kind, parts = contents_of(values)
    if kind != "model":
        raise ValueError(f"{path} is not a model, but extends a model ({kind}): name the model's own file")
    if parts > 1 and values.get(_PART_NUMBER):
        raise ValueError(f"{path} is a later part of a model in {parts} parts: name the first, {_first_of(path)}")
    for key, content in _NEEDED.items():
        if key not in values:
            raise ValueError(f"{path} contains no {content}: its header has no {key.decode()}")


def _first_of(path: Path) -> str:
    """Return the name of the first part of a model. `path` is that of any part."""
    return _PART.sub("-00001-of-", path.name)


def _size(shape: Sequence[int], type: int) -> int:
    """Return the size of a tensor in bytes, or a lower bound if its type is unknown."""
    _, weights, size = TYPES.get(type, TensorType("", 1, 0))
    return max(1, math.prod(shape) // weights * size)


def type_names(numbers: Set[int]) -> list[str]:
    """Return the names of types of tensors, for ggml's numbers."""
    return sorted(TYPES[number].name if number in TYPES else f"type {number}" for number in numbers)


def matrix_types(path: Path) -> Set[int]:
    """Return the types of all matrices in the file, as ggml type numbers.

    Raises:
        ValueError: if the file is not a GGUF file of a supported version, or if its header is broken.
    """
    with path.open("rb") as file:
        return read_header(file).matrix_types


def tokenizer_config(path: Path) -> dict[str, object]:
    """Return the values that a tokenizer_config.json of the model would contain: texts of special tokens, and flags.

    Raises:
        ValueError: if the file is not a GGUF file of a supported version, or if its header is broken.
    """
    tokens: list[bytes] = []
    values = read_values(path, tokens)
    ids = {
        f"{token_name}_token": values.get(f"tokenizer.ggml.{name}_token_id".encode())
        for name, token_name in _SPECIAL.items()
    }
    tokens_by_name = {name: tokens[id] for name, id in ids.items() if isinstance(id, int) and 0 <= id < len(tokens)}
    config = {name: token.decode(errors="replace") for name, token in tokens_by_name.items() if token}
    flags = {f"add_{name}_token": values.get(f"tokenizer.ggml.add_{name}_token".encode()) for name in ("bos", "eos")}
    return {**config, **{name: value for name, value in flags.items() if isinstance(value, bool)}}


class TokenizerHeader(NamedTuple):
    """The tokenizer in a header.

    Attributes:
        values: all key-value pairs, as in `Header`.
        tokens: the texts of the tokens, by ID.
        merges: the pairs of tokens to merge, with a space between them; empty if there are none.
        scores: the score of each token; empty if there are none.
        kinds: the type of each token, as llama.cpp's number; empty if there are none.
        characters: the table with which SentencePiece normalizes texts; empty if there is none.
    """

    values: Mapping[bytes, object]
    tokens: Sequence[bytes]
    merges: Sequence[bytes]
    scores: Sequence[float]
    kinds: Sequence[int]
    characters: bytes = b""


def read_tokenizer(path: Path) -> TokenizerHeader:
    """Read the tokenizer in the header of a file.

    Raises:
        ValueError: if the file is not a GGUF file of a supported version, or if its header is broken.
    """
    lists: dict[bytes, list[Any]] = {key: [] for key in (_TOKENS, _MERGES, _SCORES, _KINDS, _CHARACTERS)}
    with path.open("rb") as file:
        values = dict(_pairs(file, _begin(file)[1], lists))
    types = ((_TOKENS, bytes), (_MERGES, bytes), (_SCORES, (int, float)), (_KINDS, int), (_CHARACTERS, int))
    for key, kind in types:
        if not all(isinstance(item, kind) for item in lists[key]):
            raise ValueError(f"{path} is broken: {key.decode()} is a list of another type")
    tokens, merges, scores, kinds, characters = lists.values()
    for key, numbers in ((_SCORES, scores), (_KINDS, kinds)):
        if key in values and len(numbers) < len(tokens):
            raise ValueError(f"{path} is broken: {key.decode()} has {len(numbers):,} of {len(tokens):,} tokens")
    return TokenizerHeader(values, tokens, merges, scores, kinds, bytes(number & 0xFF for number in characters))


class Header(NamedTuple):
    """A complete header.

    Attributes:
        values: the key-value pairs. The value is None for a list of strings, and for a list of numbers with more items
            than any model has layers.
        tensors: the shape and the ggml type number of each tensor.
        has_head: whether the model has a head that scores texts, as rerankers and classifiers do.
    """

    values: Mapping[bytes, object]
    tensors: Sequence[tuple[Sequence[int], int]]
    has_head: bool = False

    @property
    def architecture(self) -> str:
        """The name of the model's architecture, as in llama.cpp."""
        name = self.values.get(_ARCHITECTURE)
        return name.decode(errors="replace") if isinstance(name, bytes) else ""

    @property
    def matrix_types(self) -> Set[int]:
        """The types of all matrices, as ggml type numbers."""
        return {kind for shape, kind in self.tensors if len(shape) > 1}

    @property
    def is_model(self) -> bool:
        """Whether the file contains a model, and not a projector, an adapter or statistics."""
        return contents_of(self.values)[0] == "model"

    @property
    def num_parts(self) -> int:
        """The number of files into which the model is split."""
        return contents_of(self.values)[1]


def read_header(file: BinaryIO) -> Header:
    """Read the complete header of a file.

    Args:
        file: the file. Errors contain its attribute `name`.

    Raises:
        ValueError: if the file is not a GGUF file of a supported version, or if its header is broken.
    """
    num_tensors, num_values = _begin(file)
    values = dict(_pairs(file, num_values))
    tensors = [*_tensors(file, num_tensors)]
    return Header(values, [(shape, kind) for _, shape, kind, _ in tensors], _has_head(tensors))


def first_values(file: BinaryIO) -> Iterator[tuple[bytes, object]]:
    """Yield the complete key-value pairs at the beginning of a file.

    Raises:
        ValueError: if the data is not the beginning of a GGUF file of a supported version.
    """
    count = _begin(file)[1]
    with contextlib.suppress(ValueError):
        yield from _pairs(file, count)


def _pairs(
    file: BinaryIO, count: int, lists: Mapping[bytes, list[Any]] | None = None
) -> Iterator[tuple[bytes, object]]:
    """Yield the key-value pairs, with values as in `Header`. Append the items of each list with a key in `lists` to it.

    Raises:
        ValueError: if the header is broken, or if one of these lists is longer than that of any vocabulary.
    """
    keys = set[bytes]()
    for _ in range(count):
        key = _string(file)
        if key in keys:
            raise ValueError(
                f"{file.name} is broken: its header has two values for {key[:100].decode(errors='replace')}"
            )
        keys.add(key)
        yield key, _value(file, _read(file, "I"), None if lists is None else lists.get(key))
        _check_end(file)


def _has_head(tensors: Iterable[tuple[bytes, list[int], int, int]]) -> bool:
    return any(name in _HEADS for name, _, _, _ in tensors)


def _tensors(file: BinaryIO, count: int) -> Iterator[tuple[bytes, list[int], int, int]]:
    """Yield the name, shape, type and offset of each tensor."""
    for _ in range(count):
        name = _string(file)
        if (num_dimensions := _read(file, "I")) > _MAX_DIMENSIONS:
            raise ValueError(f"{file.name} is broken: its header has a tensor of {num_dimensions:,} dimensions")
        shape = [_read(file, "Q") for _ in range(num_dimensions)]
        yield name, shape, _read(file, "I"), _read(file, "Q")
        _check_end(file)


def _check_end(file: BinaryIO) -> None:
    """Raise ValueError if the header is longer than that of any model. A file may have gigabytes of zeros."""
    if file.tell() > _MAX_HEADER:
        raise ValueError(f"{file.name} is broken: its header has more than {_MAX_HEADER:,} bytes")


def _begin(file: BinaryIO) -> tuple[int, int]:
    """Read the start of the header, and return the number of tensors and the number of key-value pairs."""
    file.seek(0)
    head = file.read(64)
    if problem := placeholder(head):
        raise ValueError(f"{file.name} {problem}")
    if not head.startswith(b"GGUF"):
        raise ValueError(f"{file.name} is not a GGUF file")
    file.seek(4)
    version = _read(file, "I")
    if version not in (2, 3):
        raise ValueError(f"{file.name} is GGUF version {version}; supported: 2 and 3")
    num_tensors, num_values = _read(file, "Q"), _read(file, "Q")
    if num_tensors > _MAX_TENSORS or num_values > _MAX_VALUES:
        counts = f"{num_values:,} values and {num_tensors:,} tensors"
        raise ValueError(f"{file.name} is broken: its header has {counts}")
    return num_tensors, num_values


def _read(file: BinaryIO, code: str) -> int:
    return struct.unpack("<" + code, _bytes(file, struct.calcsize(code)))[0]  # type: ignore[no-any-return]


def _string(file: BinaryIO) -> bytes:
    length = _read(file, "Q")
    if length > _MAX_STRING:
        raise ValueError(
            f"{file.name} is broken: its header has a string of {length:,} bytes; at most {_MAX_STRING:,} are read"
        )
    return _bytes(file, length)


def _bytes(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise ValueError(f"{file.name} ends inside its header")
    return data


def _numbers(file: BinaryIO, code: str, count: int, items: list[Any] | None) -> list[object] | None:
    """Return a list of numbers, or skip the list and return None if it has more than `_MAX_NUMBERS` items.

    Append the numbers to `items`.
    """
    here, size = file.tell(), count * struct.calcsize(code)
    if size > file.seek(0, io.SEEK_END) - here:
        raise ValueError(f"{file.name} ends inside its header")
    file.seek(here)
    if items is None and count > _MAX_NUMBERS:
        file.seek(size, io.SEEK_CUR)
        return None
    numbers = list(struct.unpack(f"<{count}{code}", file.read(size)))
    if items is not None:
        items += numbers
    return numbers if count <= _MAX_NUMBERS else None


def _strings(file: BinaryIO, count: int, items: list[Any] | None) -> None:
    """Read the strings of a list. Append them to `items`.

    Raises:
        ValueError: if the header is broken, or if the strings have more bytes than any vocabulary.
    """
    left = _MAX_TEXTS
    for _ in range(count):
        text = _string(file)
        if items is not None:
            items.append(text)
        left -= len(text)
        if left < 0:
            raise ValueError(f"{file.name} is broken: a list in its header has more than {_MAX_TEXTS:,} bytes")


def _value(file: BinaryIO, kind: int, items: list[Any] | None = None) -> object:
    """Read a value. Append the items of a list to `items`."""
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        item = _read(file, "I")
        count = _read(file, "Q")
        if count > _MAX_ITEMS and (items is not None or item == _STRING):
            raise ValueError(f"{file.name} is broken: a list in its header has {count:,} items")
        if item in _SCALARS:
            return _numbers(file, _SCALARS[item], count, items)
        if item != _STRING:
            raise ValueError(f"{file.name} is broken: its header has a list of unknown type {item}")
        _strings(file, count, items)
        return None
    if kind not in _SCALARS:
        raise ValueError(f"{file.name} is broken: its header has a value of unknown type {kind}")
    return _read(file, _SCALARS[kind])
