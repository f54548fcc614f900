"""Reads text files of users, which may come from editors and shells on any operating system."""

from __future__ import annotations

import codecs
from pathlib import Path

UTF_16 = "it is UTF-16, as PowerShell's > writes it; save it as UTF-8"
_LFS_POINTER = b"version https://git-lfs"
_UTF_16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_text(path: Path) -> str:
    """Return the text of a file, as decoded by `decode`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not UTF-8.
    """
    return decode(path.read_bytes())


def decode(data: bytes, *, mark: bool = True, otherwise: str = "") -> str:
    """Return UTF-8 data as text. A byte order mark is removed, and each line ends with a line feed.

    Args:
        mark: whether a byte order mark is allowed. Some programs cannot read files with a byte order mark.
        otherwise: encoding to use if the data is not UTF-8, or "" to raise an error.

    Raises:
        ValueError: the data has another encoding. The message contains the encoding or the position of the error, but
            not the file name.
    """
    if is_utf_16(data):
        raise ValueError(UTF_16)
    if data.startswith(codecs.BOM_UTF8) and not mark:
        raise ValueError("it begins with a byte order mark, which must be removed")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if not otherwise:
            line = error.object.count(b"\n", 0, error.start) + 1  # the object has no byte order mark
            raise ValueError(f"it is not UTF-8: byte {error.object[error.start]:#04x} in line {line}") from None
        text = data.decode(otherwise)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def is_utf_16(data: bytes) -> bool:
    """Return whether data looks like UTF-16, with or without a byte order mark."""
    return data.startswith(_UTF_16_MARKS) or b"\0" in data[:2]


def placeholder(head: bytes) -> str:
    """Return an error message if the first 64 bytes of a file show that it is empty or a Git LFS pointer, else ""."""
    if head.startswith(_LFS_POINTER):  # a clone without Git LFS
        return "is a Git LFS pointer, not the file: fetch it with `git lfs pull`"
    return "" if head else "is an empty file"
