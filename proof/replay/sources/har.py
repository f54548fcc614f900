"""Reads HAR 1.2 files, in which browsers and proxies record HTTP. Each is a JSON document, read entry by entry."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

from proof.replay.exchange import Recorded, Request, Unreadable
from proof.replay.sources.files import (
    BROKEN,
    MAX_LINE,
    File,
    Malformed,
    from_base64,
    from_text,
    is_status,
    members,
    path_of,
    reason,
    seconds,
    split_url,
    without_credentials,
)

BEGIN = re.compile(rb'\s*\{\s*"log"\s*:\s*\{')
"""Matches the beginning of a HAR file."""

_MARK = re.compile(rb'["{}\[\]]')
_STRING_END = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_ENTRIES = re.compile(rb'"entries"\s*:\s*\Z')
_PIECE = 1 << 18
_MAX_BEFORE = 256  # bytes before an array that are searched for its name
_DEPTH_OF_ENTRIES = 2  # depth of the array `log.entries`


class NoBody(Exception):
    """An entry has a request without a body, such as for a page or an image. The message is the request method."""


class _Entry(NamedTuple):
    number: int
    text: bytes


def read(files: Sequence[File]) -> Iterator[Request | Unreadable]:
    """Yield the requests with a body, each entry that cannot be read, and the number of other requests in a file."""
    for file in files:
        left_out: Counter[str] = Counter()
        for entry in _entries(file):
            if isinstance(entry, Unreadable):
                yield entry
                continue
            try:
                yield _read(f"{file.name}: entry {entry.number}", entry.text)
            except NoBody as error:
                left_out[str(error)] += 1
        if left_out:
            kinds = ", ".join(f"{method} {count}" for method, count in sorted(left_out.items()))
            yield Unreadable(file.name, f"{left_out.total()} entries without a body are skipped ({kinds})")


def _read(location: str, text: bytes) -> Request | Unreadable:
    try:
        return _request(location, {name: member.value for name, member in members(text.decode()).items()})
    except UnicodeDecodeError:
        return Unreadable(location, "it is not UTF-8")
    except Malformed as error:
        return Unreadable(location, str(error))


# -- the document --------------------------------------------------------------------------------------------------


def _entries(file: File) -> Iterator[_Entry | Unreadable]:
    scanner = EntryScanner(file.name)
    try:
        with file.open() as stream:
            while data := stream.read(_PIECE):
                yield from scanner.feed(data)
        yield from scanner.end()
    except BROKEN as error:
        yield Unreadable(file.name, f"the rest of the file cannot be read: {reason(error)}")


class _Array(Enum):
    """The position of a scanner relative to the array `log.entries`."""

    BEFORE = auto()
    WITHIN = auto()
    AFTER = auto()


class EntryScanner:
    """A scanner that extracts the objects in `log.entries` from data in chunks of any size."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._before = b""  # the last bytes before an array
        self._entry: list[bytes] | None = None
        self._size = self._number = self._depth = 0
        self._array = _Array.BEFORE
        self._in_string = self._escapes = False  # whether the last byte was in a string, and escapes the next one

    def feed(self, data: bytes) -> Iterator[_Entry | Unreadable]:
        at = 0
        while at < len(data):
            if self._in_string:
                end = self._end_of_string(data, at)
                yield from self._pass(data[at:end])
                at = end
                continue
            mark = _MARK.search(data, at)
            yield from self._pass(data[at : mark.start() if mark else None])
            if mark is None:
                return
            at = mark.end()
            if mark[0] == b'"':
                self._in_string = True
                yield from self._pass(mark[0])
            else:
                yield from self._mark(mark[0])

    def _end_of_string(self, data: bytes, at: int) -> int:
        """Return the index after the string that continues at `data[at:]`, or the length of the data."""
        begin = at + self._escapes
        closed = _STRING_END.match(data, begin)
        self._in_string = closed is None
        backslashes = 0 if closed else len(data) - max(begin, len(data.rstrip(b"\\")))
        self._escapes = backslashes > 0 and backslashes % 2 == 1
        return closed.end() if closed else len(data)

    def end(self) -> Iterator[Unreadable]:
        """Yield an error if the document ended early."""
        if self._array is _Array.BEFORE:
            yield Unreadable(self._name, "the file is not HAR: log.entries is missing")
        elif self._depth:
            number = self._number + (self._entry is None)
            yield Unreadable(f"{self._name}: entry {number}", "the file is cut off")

    def _pass(self, data: bytes) -> Iterator[Unreadable]:
        """Add scanned data to the current entry. Before the array, retain the last bytes, which may name the array."""
        if self._entry is None:
            if self._array is not _Array.WITHIN:
                self._before = (self._before + data)[-_MAX_BEFORE:]
            return
        self._size += len(data)
        if self._size > MAX_LINE:
            if self._entry:
                yield Unreadable(f"{self._name}: entry {self._number}", f"the entry is longer than {MAX_LINE} bytes")
            self._entry.clear()
        else:
            self._entry.append(data)

    def _mark(self, mark: bytes) -> Iterator[_Entry | Unreadable]:
        if mark in b"{[":
            if self._array is _Array.WITHIN and self._entry is None and mark == b"{":
                self._entry, self._size = [], 0
                self._number += 1
            elif mark == b"[" and self._depth == _DEPTH_OF_ENTRIES and _ENTRIES.search(self._before):
                self._array = _Array.WITHIN
            self._depth += 1
            yield from self._pass(mark)
            return
        yield from self._pass(mark)
        self._depth -= 1
        if self._entry is not None and self._depth == _DEPTH_OF_ENTRIES + 1:
            text, self._entry = b"".join(self._entry), None
            if text:
                yield _Entry(self._number, text)
        elif self._array is _Array.WITHIN and self._depth == _DEPTH_OF_ENTRIES:
            self._array = _Array.AFTER


# -- an entry ------------------------------------------------------------------------------------------------------


def _request(location: str, entry: Mapping[str, Any]) -> Request:
    request = entry.get("request")
    if not isinstance(request, dict):
        raise Malformed("request: must be an object")
    method, url = request.get("method"), request.get("url")
    if not isinstance(method, str) or not isinstance(url, str):
        raise Malformed("request: method and url must be strings")
    data = request.get("postData")
    if data is None:
        raise NoBody(method.upper()[:10])
    headers = without_credentials(_headers(request))
    if isinstance(data, dict) and isinstance(data.get("mimeType"), str) and data["mimeType"]:
        headers.setdefault("content-type", data["mimeType"])
    body = _content(data, "request.postData")
    if body is None:
        raise Malformed("request.postData: has no text; the program that saved the file omits the bodies of forms")
    return Request(
        location, _path(url), headers, body, method.upper(), seconds(entry.get("startedDateTime")), _response(entry)
    )


def _path(url: str) -> str:
    parts = split_url(url, "request.url")
    if parts.scheme not in ("http", "https"):
        raise Malformed(f"request.url: must have the scheme http or https, not {parts.scheme[:20]!r}")
    return path_of(parts)


def _headers(request: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    pairs = request.get("headers")
    for pair in pairs if isinstance(pairs, list) else ():
        if isinstance(pair, dict) and isinstance(pair.get("name"), str) and isinstance(pair.get("value"), str):
            yield pair["name"], pair["value"]


def _response(entry: Mapping[str, Any]) -> Recorded | None:
    """Return the response, or None if its body was not saved, as with streams in browsers."""
    response = entry.get("response")
    if not isinstance(response, dict):
        return None
    status, content = response.get("status"), response.get("content")
    if not status or not is_status(status):
        return None  # the request was blocked or interrupted
    if not isinstance(content, dict):
        return None
    body = _content(content, "response.content")
    if body is None:
        if content.get("size") != 0:
            return None
        body = b""
    return Recorded(status, _content_type(response, content), body)


def _content_type(response: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    """Return the content-type header, or else `mimeType`, which browsers write without parameters."""
    headers = {name.lower(): value for name, value in _headers(response)}
    media_type = content.get("mimeType")
    return headers.get("content-type") or (media_type if isinstance(media_type, str) else "")


def _content(content: Any, name: str) -> bytes | None:
    if not isinstance(content, dict):
        raise Malformed(f"{name}: must be an object")
    text, encoding = content.get("text"), content.get("encoding")
    if text is None:
        return None
    if encoding is None or encoding == "":
        return from_text(text, f"{name}.text")
    if encoding == "base64":
        return from_base64(text, f"{name}.text")
    raise Malformed(f"{name}.encoding: must be base64, not {str(encoding)[:20]!r}")
