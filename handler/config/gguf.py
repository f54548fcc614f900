"""Reads parts of the header of a GGUF file.

The `gguf` package parses the whole header with 50,000 tokens and their merges, which takes 1.8 s of a 3 s startup. The
format is described in github.com/ggml-org/ggml, docs/gguf.md. Versions 2 and 3, little-endian, are supported.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import BinaryIO, NamedTuple

from handler.core.text_files import placeholder

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_STRING = 1 << 26  # bytes; a chat template has a few thousand
_MAX_NUMBERS = 1 << 12  # maximum numbers in a list to keep: enough for one per layer, but not for one per token
_PART = re.compile("-[0-9]{5}-of-")  # in the name of a file of a model in several parts
_ARCHITECTURE, _TYPE = b"general.architecture", b"general.type"
_BESIDE: Mapping[object, str] = {kind.encode(): kind for kind in ("mmproj", "adapter", "imatrix")}
_TOKENS = b"tokenizer.ggml.tokens"
_NEEDED = {_ARCHITECTURE: "model", _TOKENS: "tokenizer"}
_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep", "mask": "mask"}
"""Maps the name of a token in `tokenizer.ggml.NAME_token_id` to its name in tokenizer_config.json."""
_MAX_DIMENSIONS = 4  # ggml's own limit
_PARTS, _ALIGNMENT = b"split.count", b"general.alignment"
_END_KEYS = {f"tokenizer.ggml.{name}_token_id".encode() for name in ("eos", "eot", "eom")}
_END_MARKS = {
    *(b"<|eot_id|>", b"<|im_end|>", b"<|end|>", b"<|return|>", b"<|call|>", b"<|flush|>", b"<|calls|>"),
    *(b"<end_of_turn>", b"<|endoftext|>", b"</s>", b"<|eom_id|>", b"<EOT>", b"_<EOT>", b"[EOT]", b"[EOS]"),
    *(b"<|end_of_text|>", b"<end_of_utterance>", b"<eos>", b"<turn|>", b"<|tool_response>"),
    "<｜end▁of▁sentence｜>".encode(),
}
"""Texts of tokens that end a response even if the header does not declare them as end tokens."""
_BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 10: (256, 84)}
_BLOCKS |= {11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 30: (1, 2)}
"""The number of weights in a block and the block's size in bytes, by ggml's number of the type. OpenVINO reads no other
types.
"""


def is_gguf_name(path: Path | str) -> bool:
    """Return whether a file name has the suffix of GGUF files. Some file systems and uploaders write it in capitals."""
    return str(path).lower().endswith(".gguf")


def context_length(path: Path) -> int | None:
    """Return the context length of the model in tokens, or None if the file does not contain it.

    Raises:
        ValueError: if the file is not a GGUF file of a supported version, or if its header is broken.
    """
    with path.open("rb") as file:
        for key, value in _pairs(file, _begin(file)[1]):
            if key.endswith(b".context_length") and isinstance(value, int):
                return value if value > 0 else None
    return None


def end_ids(path: Path) -> frozenset[int]:
    """Return the IDs of the tokens that end a response, as llama.cpp does (src/llama-vocab.cpp, `special_eog_ids`).

    These are the end-of-text, end-of-turn and end-of-message tokens in the header, and all tokens with a text in
    `_END_MARKS`. The end-of-text token alone is not enough, because chat templates often end a turn with another token.

    Raises:
        ValueError: if the file is not a GGUF file of a supported version, or if its header is broken.
    """
    tokens: list[bytes] = []
    values = _values(path, tokens)
    ids = [id for id in map(values.get, _END_KEYS) if isinstance(id, int) and 0 <= id < len(tokens)]
    ids += [id for id, text in enumerate(tokens) if text in _END_MARKS]
    texts, no_ends = {tokens[id] for id in ids}, set[bytes]()
    if texts >= {b"<|return|>", b"<|call|>"} or texts >= {b"<|calls|>", b"<|flush|>"}:
        no_ends.add(b"<|end|>")  # Harmony's, and Solar Open's: the end of a message, not of the response
    if b"<|tool_response>" in texts:
        no_ends.add(b"</s>")  # Gemma 4's: a word of its vocabulary
    return frozenset(id for id in ids if tokens[id] not in no_ends)


def contents(path: Path) -> tuple[str, int]:
    """Return the kind of a file, and the number of files into which the model is split, according to the header.

    The kind is "model", or the llama.cpp name for a file that accompanies a model: "mmproj", "adapter" or "imatrix".

    Raises:
        ValueError: if the file is not a GGUF file of a supported version, or if its header is broken.
    """
    return _contents(_values(path))


def kind_and_values(path: Path) -> tuple[str, dict[bytes, object]]:
    """Return the kind of a file, as in `contents`, and the key-value pairs of its header."""
    values = _values(path)
    return _contents(values)[0], values


def _values(path: Path, tokens: list[bytes] | None = None) -> dict[bytes, object]:
    """Return the key-value pairs of the header. Append the texts of all tokens to `tokens`."""
    with path.open("rb") as file:
        return dict(_pairs(file, _begin(file)[1], tokens))


def _contents(values: Mapping[bytes, object]) -> tuple[str, int]:
    kind, parts = values.get(_TYPE), values.get(_PARTS)
    kind = kind if isinstance(kind, bytes) else None  # not a string, but a number or a list
    if values.get(_ARCHITECTURE) == b"clip":
        kind = b"mmproj"  # early projectors have no type
    return _BESIDE.get(kind, "model"), parts if isinstance(parts, int) and parts else 1


def in_parts(parts: int, first: str) -> str:
    return f"a model in {parts} parts: merge them with `llama-gguf-split --merge {first} merged.gguf`"


def check_complete(path: Path) -> Header:
    """Check that a file contains a complete model, and return its header.

    OpenVINO would read past the end of a truncated file, and either crash or use zeros as weights.

    Raises:
        ValueError: if the file is not a GGUF file, is not a model, is one of several parts, or is truncated or broken.
    """
    with path.open("rb") as file:
        num_tensors, num_values = _begin(file)
        values = dict(_pairs(file, num_values))
        _check_model(path, values)
        tensors = [*_tensors(file, num_tensors)]
        last = max((offset + _size(shape, type) for shape, type, offset in tensors), default=1)
        alignment = values.get(_ALIGNMENT) or 32
        if not isinstance(alignment, int):
            raise ValueError(f"{path} is broken: its alignment is not a number")
        size, needed = path.stat().st_size, -(-file.tell() // alignment) * alignment + last
    if size < needed:
        raise ValueError(f"{path} is cut short: it has {size:,} bytes, but its header describes {needed:,}")
    return Header(values, [(shape, type) for shape, type, _ in tensors])


def _check_model(path: Path, values: Mapping[bytes, object]) -> None:
    kind, parts = _contents(values)
    if kind != "model":
        raise ValueError(f"{path} is not a model, but extends a model ({kind}): name the model's own file")
    if parts > 1:
        raise ValueError(f"{path} is part of {in_parts(parts, _PART.sub('-00001-of-', path.name))}")
    for key, content in _NEEDED.items():
        if key not in values:
            raise ValueError(f"{path} contains no {content}: its header has no {key.decode()}")


def _size(shape: Sequence[int], type: int) -> int:
    """Return the size of a tensor in bytes, or a lower bound if its type is unknown."""
    weights, size = _BLOCKS.get(type, (1, 0))
    return max(1, math.prod(shape) // weights * size)


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
    values = _values(path, tokens)
    ids = {
        f"{token_name}_token": values.get(f"tokenizer.ggml.{name}_token_id".encode())
        for name, token_name in _SPECIAL.items()
    }
    tokens_by_name = {name: tokens[id] for name, id in ids.items() if isinstance(id, int) and 0 <= id < len(tokens)}
    config = {name: token.decode(errors="replace") for name, token in tokens_by_name.items() if token}
    flags = {f"add_{name}_token": values.get(f"tokenizer.ggml.add_{name}_token".encode()) for name in ("bos", "eos")}
    return {**config, **{name: value for name, value in flags.items() if isinstance(value, bool)}}


class Header(NamedTuple):
    """A complete header.

    Attributes:
        values: the key-value pairs. The value is None for a list of strings, and for a list of numbers with more items
            than any model has layers.
        tensors: the shape and the ggml type number of each tensor.
    """

    values: Mapping[bytes, object]
    tensors: Sequence[tuple[Sequence[int], int]]

    @property
    def architecture(self) -> str:
        """The name of the model's architecture, as in llama.cpp."""
        name = self.values.get(_ARCHITECTURE)
        return name.decode(errors="replace") if isinstance(name, bytes) else ""

    @property
    def matrix_types(self) -> Set[int]:
        """The types of all matrices, as ggml type numbers."""
        return {kind for shape, kind in self.tensors if len(shape) > 1}


def read_header(file: BinaryIO) -> Header:
    """Read the complete header of a file.

    Args:
        file: the file. Errors contain its attribute `name`.

    Raises:
        ValueError: if the file is not a GGUF file of a supported version, or if its header is broken.
    """
    num_tensors, num_values = _begin(file)
    values = dict(_pairs(file, num_values))
    return Header(values, [(shape, kind) for shape, kind, _ in _tensors(file, num_tensors)])


def first_values(file: BinaryIO) -> Iterator[tuple[bytes, object]]:
    """Yield the complete key-value pairs at the beginning of a file.

    Raises:
        ValueError: if the data is not the beginning of a GGUF file of a supported version.
    """
    count = _begin(file)[1]
    with contextlib.suppress(ValueError):
        yield from _pairs(file, count)


def _pairs(file: BinaryIO, count: int, tokens: list[bytes] | None = None) -> Iterator[tuple[bytes, object]]:
    """Yield the key-value pairs, with values as in `Header`. Append the texts of all tokens to `tokens`."""
    for _ in range(count):
        key = _string(file)
        yield key, _value(file, _read(file, "I"), tokens if key == _TOKENS else None)


def _tensors(file: BinaryIO, count: int) -> Iterator[tuple[list[int], int, int]]:
    """Yield the shape, type and offset of each tensor."""
    for _ in range(count):
        _string(file)
        if (num_dimensions := _read(file, "I")) > _MAX_DIMENSIONS:
            raise ValueError(f"{file.name} is broken: its header has a tensor of {num_dimensions:,} dimensions")
        shape = [_read(file, "Q") for _ in range(num_dimensions)]
        yield shape, _read(file, "I"), _read(file, "Q")


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
    return _read(file, "Q"), _read(file, "Q")


def _read(file: BinaryIO, code: str) -> int:
    return struct.unpack("<" + code, _bytes(file, struct.calcsize(code)))[0]  # type: ignore[no-any-return]


def _string(file: BinaryIO) -> bytes:
    length = _read(file, "Q")
    if length > _MAX_STRING:
        raise ValueError(f"{file.name} is broken: its header has a string of {length:,} bytes")
    return _bytes(file, length)


def _bytes(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise ValueError(f"{file.name} ends inside its header")
    return data


def _numbers(file: BinaryIO, code: str, count: int) -> list[object] | None:
    """Return a list of numbers, or skip the list and return None if it has more than `_MAX_NUMBERS` items."""
    here, size = file.tell(), count * struct.calcsize(code)
    if size > file.seek(0, io.SEEK_END) - here:
        raise ValueError(f"{file.name} ends inside its header")
    file.seek(here)
    if count <= _MAX_NUMBERS:
        return list(struct.unpack(f"<{count}{code}", file.read(size)))
    file.seek(size, io.SEEK_CUR)
    return None


def _value(file: BinaryIO, kind: int, strings: list[bytes] | None = None) -> object:
    """Read a value. Append the strings of a list to `strings`."""
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        item = _read(file, "I")
        count = _read(file, "Q")
        if item in _SCALARS:
            return _numbers(file, _SCALARS[item], count)
        if item != _STRING:
            raise ValueError(f"{file.name} is broken: its header has a list of unknown type {item}")
        for _ in range(count):
            text = _string(file)
            if strings is not None:
                strings.append(text)
        return None
    if kind not in _SCALARS:
        raise ValueError(f"{file.name} is broken: its header has a value of unknown type {kind}")
    return _read(file, _SCALARS[kind])
