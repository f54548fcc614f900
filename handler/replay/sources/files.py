"""The files of a source: one, a directory's, or those below a prefix of S3; and their lines, none of them too long."""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from handler.core import text_files
from handler.core.errors import ConfigError
from handler.replay.request import Unreadable
from handler.replay.sources.s3 import FORM, SCHEME, objects

MAX_LINE = 128 << 20
"""Bytes of a line: a request and an answer of SageMaker's 25 MB each in base64 have 67 million."""

MOST_FILES = 500_000
"""Their names are kept; what is in them is not."""

SUFFIXES = (".jsonl", ".ndjson", ".json", ".har", ".out")
"""Of the files that are read in a directory, with or without `.gz` behind."""

BROKEN = (OSError, EOFError, zlib.error)
"""Errors in reading a file: of the disk, of S3, or of what was compressed."""

_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"


class File(NamedTuple):
    """A file of a source.

    Attributes:
        name: below the source, with `/`; for messages.
        folders: the names of its folders below the source.
        open_raw: opens it as it is stored.
    """

    name: str
    folders: tuple[str, ...]
    size: int
    open_raw: Callable[[], IO[bytes]]

    @contextlib.contextmanager
    def open(self) -> Iterator[io.BufferedReader]:
        """Open it, decompressed. That and reading it may raise one of BROKEN."""
        with contextlib.ExitStack() as opened:
            stream = _buffered(opened.enter_context(self.open_raw()))
            if stream.peek(2).startswith(_GZIP):
                stream = _buffered(opened.enter_context(gzip.GzipFile(fileobj=stream)))
            if stream.peek(3).startswith(_BOM):
                stream.read(3)
            if text_files.is_utf_16(stream.peek(2)):
                raise OSError(errno.EILSEQ, text_files.UTF_16)
            yield stream


def _buffered(stream: Any) -> io.BufferedReader:
    return io.BufferedReader(stream, 1 << 16)


class Line(NamedTuple):
    """A line that is not empty, and where it stands."""

    place: str
    text: str


def find(argument: str) -> list[File]:
    """List the files that an argument names, sorted by name.

    Raises:
        ConfigError: there are none, or too many.
    """
    found = list(_found(argument))
    if not found:
        raise ConfigError(f"{argument}: there are no files to read ({', '.join(SUFFIXES)}, also with .gz)")
    return sorted(found)


def _found(argument: str) -> Iterator[File]:
    files = _in_s3(argument) if argument.startswith(SCHEME) else _on_disk(Path(argument), argument)
    for number, file in enumerate(files):
        if number == MOST_FILES:
            raise ConfigError(f"{argument}: has more than {MOST_FILES} files: name a part of it, as one day")
        yield file


def _on_disk(path: Path, argument: str) -> Iterator[File]:
    if path.is_file():
        yield _file(path, path.name)
    elif path.is_dir():
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in names:
                if _is_wanted(name):
                    file = Path(folder) / name
                    yield _file(file, file.relative_to(path).as_posix())
    else:
        raise ConfigError(f"{argument}: there is no such file or directory; of S3: {FORM}")


def _file(path: Path, name: str) -> File:
    try:
        size = path.stat().st_size
    except OSError:  # it has gone, or is a link to nothing: opening it says so
        size = 0
    name = name.encode("utf-8", "replace").decode()  # of a name that is no UTF-8
    return File(name, tuple(name.split("/")[:-1]), size, lambda: path.open("rb", buffering=0))


def _in_s3(argument: str) -> Iterator[File]:
    for name, size, opened in objects(argument):
        if _is_wanted(name.rpartition("/")[2]) or "/" not in name:
            yield File(name, tuple(name.split("/")[:-1]), size, opened)


def _is_wanted(name: str) -> bool:
    return not name.startswith(".") and name.removesuffix(".gz").endswith(SUFFIXES)


def lines(file: File) -> Iterator[Line | Unreadable]:
    """Yield a file's lines. What cannot be read of it is told, and ends it where it ends the file."""
    number = 0
    try:
        with file.open() as stream:
            while data := stream.readline(MAX_LINE + 1):
                number += 1
                place = f"{file.name}:{number}"
                if len(data) > MAX_LINE and not data.endswith(b"\n"):
                    _skip(stream)
                    yield Unreadable(place, f"the line is longer than {MAX_LINE} bytes")
                elif data.strip():
                    yield _line(place, data)
    except BROKEN as error:
        yield Unreadable(f"{file.name}:{number + 1}", f"the rest of the file cannot be read: {reason(error)}")


def _line(place: str, data: bytes) -> Line | Unreadable:
    try:
        return Line(place, data.rstrip(b"\r\n").decode())
    except UnicodeDecodeError as error:
        return Unreadable(place, f"it is not UTF-8: byte {data[error.start]:#04x} at {error.start}")


def _skip(stream: io.BufferedReader) -> None:
    """Read to the line's end, in pieces."""
    while (data := stream.readline(1 << 20)) and not data.endswith(b"\n"):
        continue


def reason(error: Exception) -> str:
    """Return why a file could not be read, in words."""
    if isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile)):
        return "its compressed data is damaged or cut off"
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
