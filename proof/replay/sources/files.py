"""The files of a recording, on disk or in S3: their lines and fields, and temporary tables for lookups."""

from __future__ import annotations

import base64
import binascii
import contextlib
import errno
import gzip
import importlib.util
import io
import json
import math
import os
import re
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar
from urllib.parse import SplitResult, urlsplit

from handler.core import text_files
from handler.core.errors import ConfigError
from handler.core.package import install
from handler.core.secrets import is_credential, path_without_credentials
from proof.replay.exchange import Request, Unreadable

T = TypeVar("T")

SCHEME = "s3://"
FORM = "write it as s3://BUCKET/PREFIX/"

_TRIES = 5  # maximum number of broken connections while an object is read
_PIECE = 1 << 20


def objects(argument: str) -> Iterator[tuple[str, int, Callable[[], IO[bytes]]]]:
    """Yield the name and size of each S3 object at or below `argument`, and a function that opens the object.

    Raises:
        ConfigError: boto3 is not installed, or S3 refuses the request.
    """
    bucket, _, prefix = argument.removeprefix(SCHEME).partition("/")
    if not bucket:
        raise ConfigError(f"{argument}: {FORM}")
    if importlib.util.find_spec("boto3") is None:
        raise ConfigError(f"{argument}: boto3 is not installed; to install it: {install('lmi-handler[deploy]')}")
    client = _client()
    with _as_config_error(argument):
        if prefix and not prefix.endswith("/"):
            for item in client.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1).get("Contents", ()):
                if item["Key"] == prefix:
                    yield _s3_object(client, bucket, item, prefix.rpartition("/")[2])
                    return
            prefix += "/"
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for item in page.get("Contents", ()):
                yield _s3_object(client, bucket, item, item["Key"].removeprefix(prefix))


def _client() -> Any:
    import boto3
    from botocore.config import Config

    return boto3.session.Session().client("s3", config=Config(retries={"mode": "standard", "total_max_attempts": 5}))


def _s3_object(client: Any, bucket: str, item: Any, name: str) -> tuple[str, int, Callable[[], IO[bytes]]]:
    return name, item["Size"], lambda: _Object(client, bucket, item["Key"], item["ETag"], item["Size"])  # type: ignore[return-value]


@contextlib.contextmanager
def _as_config_error(argument: str) -> Iterator[None]:
    """Convert boto3 errors to a ConfigError that explains what to do."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        advice = {
            "NoSuchBucket": "there is no such bucket",
            "AccessDenied": "access denied: you need s3:ListBucket, s3:GetObject and, for KMS keys, kms:Decrypt",
        }.get(code, str(error))
        raise ConfigError(f"{argument}: {advice}") from None
    except BotoCoreError as error:
        raise ConfigError(f"{argument}: {error}") from None


class _Object(io.RawIOBase):
    """An S3 object as a raw stream that reconnects if the connection breaks."""

    def __init__(self, client: Any, bucket: str, key: str, etag: str, size: int) -> None:
        self._client = client
        self._request = {"Bucket": bucket, "Key": key, "IfMatch": etag}
        self._size, self._at, self._tries = size, 0, 0
        self._body: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes.

        Raises:
            OSError: the request to S3 was refused, or the connection broke too often.
        """
        from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
        from urllib3.exceptions import HTTPError

        while self._at < self._size:
            try:
                if self._body is None:
                    self._body = self._client.get_object(**self._request, Range=f"bytes={self._at}-")["Body"]
                if data := self._body.read(min(len(buffer), _PIECE)):
                    buffer[: len(data)] = data
                    self._at += len(data)
                    return len(data)
                raise HTTPError("the object ended early")
            except ClientError as error:
                raise OSError(f"S3: {error}") from None
            except (HTTPError, HTTPClientError, BotoCoreError) as error:
                self._body, self._tries = None, self._tries + 1
                if self._tries >= _TRIES:
                    raise OSError(f"S3 closed the connection {self._tries} times: {error}") from None
        return 0

    def close(self) -> None:
        if self._body is not None:
            self._body.close()
        super().close()


MAX_LINE = 128 << 20
"""Maximum size of a line, in bytes. A request and a response of 25 MB (SageMaker's maximum) take 67 MB in base64."""

MAX_FILES = 500_000
"""Maximum number of files. Their names are stored in memory."""

SUFFIXES = (".jsonl", ".ndjson", ".json", ".har", ".out")
"""Suffixes of the files that are read in a directory; `.gz` may follow."""

BROKEN = (OSError, EOFError, zlib.error)
"""Errors from reading a file on disk or in S3, and from decompressing it."""

_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"


class File(NamedTuple):
    """A file of a recording.

    Attributes:
        name: the path relative to the recording, with `/`, for messages.
        folders: the names of the folders that contain the file, relative to the recording.
        open_raw: a function that opens the file without decompression.
    """

    name: str
    folders: tuple[str, ...]
    size: int
    open_raw: Callable[[], IO[bytes]]

    @contextlib.contextmanager
    def open(self) -> Iterator[io.BufferedReader]:
        """Open the file, and decompress it if it is compressed. Opening and reading it may raise one of BROKEN."""
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


class SourceLine(NamedTuple):
    """A non-empty line, and its position as FILE:NUMBER."""

    location: str
    text: str


def find(argument: str) -> list[File]:
    """Return the files for an argument, sorted by name.

    Raises:
        ConfigError: there are no files, or too many.
    """
    files = list(_files(argument))
    if not files:
        raise ConfigError(f"{argument}: there are no files to read ({', '.join(SUFFIXES)}, also with .gz)")
    return sorted(files)


def _files(argument: str) -> Iterator[File]:
    files = _in_s3(argument) if argument.startswith(SCHEME) else _on_disk(Path(argument), argument)
    for number, file in enumerate(files):
        if number == MAX_FILES:
            raise ConfigError(f"{argument}: contains more than {MAX_FILES} files; name a part of it, such as one day")
        yield file


def _on_disk(path: Path, argument: str) -> Iterator[File]:
    if path.is_file():
        yield _file(path, path.name)
    elif path.is_dir():
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in names:
                if _is_source(name):
                    file = Path(folder) / name
                    yield _file(file, file.relative_to(path).as_posix())
    else:
        raise ConfigError(f"{argument}: there is no such file or directory; for S3, {FORM}")


def _file(path: Path, name: str) -> File:
    try:
        size = path.stat().st_size
    except OSError:  # the file is gone, or is a broken link; opening it reports that
        size = 0
    name = name.encode("utf-8", "replace").decode()  # the name may not be UTF-8
    return File(name, tuple(name.split("/")[:-1]), size, lambda: path.open("rb", buffering=0))


def _in_s3(argument: str) -> Iterator[File]:
    for name, size, opened in objects(argument):
        if _is_source(name.rpartition("/")[2]) or "/" not in name:
            yield File(name, tuple(name.split("/")[:-1]), size, opened)


def _is_source(name: str) -> bool:
    return not name.startswith(".") and name.removesuffix(".gz").endswith(SUFFIXES)


def lines(file: File) -> Iterator[SourceLine | Unreadable]:
    """Yield the lines of a file, or an `Unreadable` for a line or a rest of the file that cannot be read."""
    number = 0
    try:
        with file.open() as stream:
            while data := stream.readline(MAX_LINE + 1):
                number += 1
                location = f"{file.name}:{number}"
                if len(data) > MAX_LINE and not data.endswith(b"\n"):
                    _skip(stream)
                    yield Unreadable(location, f"the line is longer than {MAX_LINE} bytes")
                elif data.strip():
                    yield _line(location, data)
    except BROKEN as error:
        yield Unreadable(f"{file.name}:{number + 1}", f"the rest of the file cannot be read: {reason(error)}")


def read_lines(file: File, parse: Callable[[str, dict[str, Member]], T]) -> Iterator[T | Unreadable]:
    """Yield the result of `parse` for each line of a file, or an `Unreadable` if it cannot be read or is `Malformed`.

    Args:
        parse: a function that takes the position of a line and the members of its JSON object.
    """
    for line in lines(file):
        if isinstance(line, Unreadable):
            yield line
            continue
        try:
            yield parse(line.location, members(line.text))
        except Malformed as error:
            yield Unreadable(line.location, str(error))


def _line(location: str, data: bytes) -> SourceLine | Unreadable:
    try:
        return SourceLine(location, data.rstrip(b"\r\n").decode())
    except UnicodeDecodeError as error:
        return Unreadable(location, f"it is not UTF-8: byte {data[error.start]:#04x} at position {error.start}")


def _skip(stream: io.BufferedReader) -> None:
    """Skip the rest of a line in chunks."""
    while (data := stream.readline(1 << 20)) and not data.endswith(b"\n"):
        continue


def reason(error: Exception) -> str:
    """Return the reason why a file could not be read."""
    if isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile)):
        return "its compressed data is damaged or cut off"
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


# -- temporary tables for lookups ------------------------------------------------------------------------------------


@contextlib.contextmanager
def database(*statements: str) -> Iterator[sqlite3.Connection]:
    """Open a database in an unnamed temporary file, and create its tables.

    Raises:
        ConfigError: the disk is full or not writable. This is also raised while the database is in use.
    """
    connection = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    try:
        for statement in ("PRAGMA journal_mode=OFF", "PRAGMA synchronous=OFF", *statements):
            connection.execute(statement)
        yield connection
    except sqlite3.OperationalError as error:
        raise ConfigError(f"the temporary file of the recording: {error}: set SQLITE_TMPDIR to another disk") from None
    finally:
        connection.close()


def with_unique_ids(requests: Iterable[Request | Unreadable]) -> Iterator[Request | Unreadable]:
    """Yield the requests. A request with the same ID as an earlier request is replaced with an `Unreadable`."""
    with database("CREATE TABLE ids (id TEXT PRIMARY KEY) WITHOUT ROWID") as ids:
        for item in requests:
            if isinstance(item, Request):
                try:
                    new = ids.execute("INSERT OR IGNORE INTO ids VALUES (?)", (item.id,)).rowcount
                except UnicodeEncodeError:
                    yield Unreadable(repr(item.id), "the id has a lone surrogate, which is not text")
                    continue
                if not new:
                    yield Unreadable(item.id, "an earlier request with this id is used instead")
                    continue
            yield item


# -- fields of recordings: JSON members, bodies, statuses, URLs, times -------------------------------------------------


_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


class Member(NamedTuple):
    """The value of a JSON member, and its original text."""

    value: Any
    text: str


ABSENT = Member(None, "null")


class Malformed(ValueError):
    """An item in a recording is malformed. The message contains the field name."""


def members(text: str) -> dict[str, Member]:
    """Read the members of a JSON object. The last value of a repeated name is used.

    Raises:
        Malformed: the text is not a JSON object, is cut off, or is nested too deeply.
    """
    try:
        return _members(text)
    except Malformed:
        raise
    except RecursionError:
        raise Malformed("it is nested too deeply") from None
    except (ValueError, StopIteration) as error:
        raise Malformed(f"it is not JSON: {str(error)[:100] or 'a value is missing'}") from None


def _members(text: str) -> dict[str, Member]:
    at = _after_space(text, 0)
    if text[at : at + 1] != "{":
        raise Malformed("it is not a JSON object" if text[at:] else "it is empty")
    fields: dict[str, Member] = {}
    at = _after_space(text, at + 1)
    if text[at : at + 1] == "}":
        return _ended(text, at + 1, fields)
    while True:
        if text[at : at + 1] != '"':
            raise Malformed("it is not JSON: it ends early, or a name is missing")
        name, at = _DECODER.raw_decode(text, at)
        at = _after_space(text, at)
        if text[at : at + 1] != ":":
            raise Malformed("it is not JSON: it ends early, or a colon is missing")
        begin = _after_space(text, at + 1)
        value, end = _DECODER.raw_decode(text, begin)
        fields[name] = Member(value, text[begin:end])
        at = _after_space(text, end)
        mark = text[at : at + 1]
        if mark == "}":
            return _ended(text, at + 1, fields)
        if mark != ",":
            raise Malformed("it is not JSON: it ends early, or a comma is missing")
        at = _after_space(text, at + 1)


def _ended(text: str, at: int, fields: dict[str, Member]) -> dict[str, Member]:
    if _after_space(text, at) != len(text):
        raise Malformed("it is not JSON: something follows the object")
    return fields


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


# -- bodies, statuses and URLs -----------------------------------------------------------------------------------------


def from_base64(value: Any, name: str) -> bytes:
    """Decode a base64 field.

    Raises:
        Malformed: the value is not base64.
    """
    if not isinstance(value, str):
        raise Malformed(f"{name}: is not a string")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Malformed(f"{name}: is not base64: {error}") from None


def from_text(value: Any, name: str) -> bytes:
    """Encode a string as UTF-8.

    Raises:
        Malformed: the value is not a string, or has a lone surrogate.
    """
    if not isinstance(value, str):
        raise Malformed(f"{name}: is not a string")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise Malformed(f"{name}: has a lone surrogate, which is not text") from None


def from_member(member: Member, name: str) -> bytes:
    """Return a member as a body: the text of a string, nothing for null, or else the original JSON.

    Raises:
        Malformed: a string has a lone surrogate.
    """
    if member.value is None:
        return b""
    return from_text(member.value if isinstance(member.value, str) else member.text, name)


def is_status(value: Any) -> bool:
    """Return whether a value is an HTTP status. An unknown status is recorded as 0, which is accepted too."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1000


def split_url(url: str, name: str) -> SplitResult:
    """Split a URL.

    Raises:
        Malformed: the text is not a URL.
    """
    try:
        return urlsplit(url)
    except ValueError:
        raise Malformed(f"{name}: is not a URL") from None


def path_of(parts: SplitResult) -> str:
    """Return the path with its query string, but without API keys."""
    return path_without_credentials((parts.path or "/") + (f"?{parts.query}" if parts.query else ""))


_OF_THE_CONNECTION = frozenset(
    {
        "host", "connection", "content-length", "transfer-encoding", "keep-alive", "trailer", "upgrade", "expect",
        "accept-encoding", "origin", "referer", "via", "forwarded", "priority", "pragma", "cache-control", "dnt",
    }
)  # fmt: skip
_PREFIXES_OF_THE_CONNECTION = (":", "sec-", "proxy-", "x-forwarded-", "x-amz-", "cf-", "access-control-")


def without_credentials(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the headers of a request that is to be sent again, with names in lower case.

    Credentials and headers that belong to the connection are omitted.
    """
    passed = {}
    for header, value in headers:
        name = header.strip().lower()
        if not (is_credential(name) or name in _OF_THE_CONNECTION or name.startswith(_PREFIXES_OF_THE_CONNECTION)):
            passed[name] = value
    return passed


# -- times of recordings, in seconds since the epoch -------------------------------------------------------------------


def seconds(value: Any) -> float | None:
    """Parse a number of seconds, or a time in ISO 8601, by default in UTC. Return None for any other value."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value) if abs(value) < 1e12 and math.isfinite(value) else None
    if not isinstance(value, str) or len(value) > 40:
        return None
    try:
        time = datetime.fromisoformat(_to_microseconds(value.strip().replace("Z", "+00:00").replace("z", "+00:00")))
        return (time if time.tzinfo else time.replace(tzinfo=timezone.utc)).timestamp()
    except (ValueError, OverflowError):
        return None


def _to_microseconds(text: str) -> str:
    """Pad or cut the fraction of a second to six digits, as required by Python 3.10."""
    head, dot, fraction = text.partition(".")
    if not dot:
        return text
    digits = fraction[: len(fraction) - len(fraction.lstrip("0123456789"))]
    return f"{head}.{digits[:6]:0<6}{fraction[len(digits) :]}"
