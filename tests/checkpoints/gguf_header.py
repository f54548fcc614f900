"""GGUF files that are headers without weights."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.checkpoints.small_gguf import LETTERS

Value = str | bytes | bool | int | float | Sequence["str | bytes | int | float"]


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(item: Value) -> bytes:
    """The type and the bytes of a value."""
    if isinstance(item, str | bytes):
        return struct.pack("<I", 8) + string(item)
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if item and all(isinstance(part, int) for part in item):
        return struct.pack(f"<IIQ{len(item)}i", 9, 5, len(item), *item)
    items = [value(part) for part in item]
    kind = items[0][:4] if items else struct.pack("<I", 8)
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(items)) + b"".join(part[4:] for part in items)


def header(values: Mapping[str, Value]) -> bytes:
    pairs = b"".join(string(key) + value(item) for key, item in values.items())
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)) + pairs


def write_header(path: Path, values: Mapping[str, Value]) -> Path:
    """Write a file with these values. Names without a dot are those of the tokenizer."""
    full = {name if "." in name else f"tokenizer.ggml.{name}": item for name, item in values.items()}
    path.write_bytes(header({"general.architecture": "llama", **full}))
    return path


WORDS = ["he", "ll", "hell", "hello", "Ġw", "Ġwo", "Ġwor", "rl", "ld", "12", "ĠĠ", "ĊĊ"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "Ġwo r", "r l", "l d", "1 2", "Ġ Ġ", "Ċ Ċ"]
MARKS = ["<|im_start|>", "<|im_end|>", "<tool>"]


def byte_level(pre: str = "gpt-2", **more: Value) -> dict[str, Value]:
    """A vocabulary of all bytes, a few words, two control tokens and a token of a user."""
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*LETTERS, *WORDS, *MARKS],
        "token_type": [1] * (256 + len(WORDS)) + [3, 3, 4],
        "merges": MERGES,
        "bos_token_id": 268,
        "eos_token_id": 269,
        **more,
    }


SPM_WORDS = ["▁", "a", "b", "c", "ab", "abc", "▁a", "▁ab", "▁▁", "bc", "aa", "aaa"]


def sentence_piece(**more: Value) -> dict[str, Value]:
    """A vocabulary of SentencePiece with all bytes and a few words, of which later ones score less."""
    return {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPM_WORDS, "<tool>"],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(SPM_WORDS) + [4],
        "scores": [0.0] * 259 + [-float(place) for place in range(len(SPM_WORDS))] + [0.0],
        **more,
    }
