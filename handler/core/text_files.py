"""Reads the text files of users, as editors and shells of every system leave them."""

from __future__ import annotations

import codecs
from pathlib import Path

UTF_16 = "it is UTF-16, as PowerShell's > writes it; save it as UTF-8"
_LFS_POINTER = b"version https://git-lfs"
_UTF_16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_text(path: Path) -> str:
    """Return a file's text; see `decode`.

    Raises:
        OSError: it cannot be read.
        ValueError: as `decode`.
    """
    return decode(path.read_bytes())


def decode(data: bytes, *, mark: bool = True, otherwise: str = "") -> str:
    """Return UTF-8 as text without its byte order mark, each line ended by a line feed.

    Args:
        mark: whether the file may have a byte order mark; else other readers of it would fail.
        otherwise: the encoding of what is not UTF-8; "" for none.

    Raises:
        ValueError: names the actual encoding, or the place of the error; the caller names the file.
    """
    if is_utf_16(data):
        raise ValueError(UTF_16)
    if data.startswith(codecs.BOM_UTF8) and not mark:
        raise ValueError("it begins with a byte order mark; save it as UTF-8 without one")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if not otherwise:
            line = error.object.count(b"\n", 0, error.start) + 1  # the object lacks the mark
            raise ValueError(f"it is not UTF-8: byte {error.object[error.start]:#04x} in line {line}") from None
        text = data.decode(otherwise)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def is_utf_16(data: bytes) -> bool:
    """Return whether data begin as UTF-16 does, perhaps without its byte order mark."""
    return data.startswith(_UTF_16_MARKS) or b"\0" in data[:2]


def placeholder(head: bytes) -> str:
    """Describe a placeholder that replaces a file, from its first 64 bytes; "" for a real file."""
    if head.startswith(_LFS_POINTER):  # a clone without Git LFS
        return "is a Git LFS pointer, not the file: fetch it with `git lfs pull`"
    return "" if head else "is an empty file"
