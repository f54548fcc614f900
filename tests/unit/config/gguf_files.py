"""Whole and broken GGUF files, as small as they can be."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


ARCHITECTURE = pair(b"general.architecture", 8, string(b"llama"))
TOKENS = pair(b"tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2) + string(b"a") + string(b"b"))
NUMBERS = pair(b"x", 9, struct.pack("<IQ", 4, 3) + bytes(12))
TENSOR = string(b"w") + struct.pack("<IQIQ", 1, 4, 0, 0)


def gguf_file(*pairs: bytes, version: int = 3, tensors: bytes = TENSOR, count: int | None = None) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, 1, len(pairs) if count is None else count)
    header = head + b"".join(pairs) + tensors
    return header + bytes(-len(header) % 32) + bytes(16)  # the tensor's four numbers


VOCABULARY = b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + ARCHITECTURE + TOKENS  # a file as llama.cpp's ggml-vocab-*.gguf
SPLIT = pair(b"split.count", 2, struct.pack("<H", 3))
READABLE = (
    pair(b"general.file_type", 4, struct.pack("<I", 7)),
    pair(b"tokenizer.ggml.model", 8, string(b"gpt2")),
    pair(b"tokenizer.ggml.pre", 8, string(b"smollm")),
    pair(b"tokenizer.ggml.merges", 9, struct.pack("<IQ", 8, 1) + string(b"a b")),
    pair(b"tokenizer.ggml.token_type", 9, struct.pack("<IQ", 5, 2) + bytes(8)),
    pair(b"llama.block_count", 4, struct.pack("<I", 1)),
    pair(b"llama.embedding_length", 4, struct.pack("<I", 256)),
    pair(b"llama.attention.head_count", 4, struct.pack("<I", 1)),
    pair(b"llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)),
)
"""The keys, besides the architecture and the tokens, without which OpenVINO GenAI does not read a file."""
WHOLE = gguf_file(ARCHITECTURE, NUMBERS, TOKENS, *READABLE)


def matrix(kind: int) -> bytes:
    return string(b"w") + struct.pack("<IQQIQ", 2, 256, 1, kind, 0)


def genai_file(*pairs: bytes, kind: int = 8) -> bytes:
    """A file with one matrix of 256 weights of a kind, and enough bytes for it."""
    return gguf_file(ARCHITECTURE, TOKENS, *(pairs or READABLE), tensors=matrix(kind)) + bytes(1024)


def part(number: int, count: int, *pairs: bytes, cut: int = 0) -> bytes:
    numbers = (pair(b"split.no", 2, struct.pack("<H", number)), pair(b"split.count", 2, struct.pack("<H", count)))
    data = gguf_file(*pairs, *numbers, tensors=matrix(8)) + bytes(256)  # the tensor has 272 bytes
    return data[: len(data) - cut]


def in_parts(directory: Path, changes: Mapping[int, bytes | None] | None = None) -> Path:
    """Write a model in three parts, some of them changed or missing, and return the path of the first part."""
    parts: dict[int, bytes | None] = {1: part(0, 3, ARCHITECTURE, TOKENS, *READABLE), 2: part(1, 3), 3: part(2, 3)}
    for number, data in {**parts, **(changes or {})}.items():
        if data is not None:
            (directory / f"m-{number:05}-of-00003.gguf").write_bytes(data)
    return directory / "m-00001-of-00003.gguf"
