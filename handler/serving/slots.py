"""The clients' answers of a host without an event loop, as far as they have come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from handler.core.errors import ServingError
from handler.plugins.formatter_thread import ThreadedReply
from handler.protocols.base import HttpResponse, ParsedRequest
from handler.serving.stats import Record


class Item(NamedTuple):
    """One request as it arrives; header names in lower case."""

    body: bytes
    headers: Mapping[str, str]


class Place:
    """One client's answer as far as it has come.

    `unsent` holds the bytes that nobody has fetched yet. `status` and `content_type` are settled when `begun`; a
    `finished` place gets nothing more.
    """

    __slots__ = (
        "_call", "_ids", "_record", "_threaded", "begun", "committed", "content_type",
        "error", "finished", "ignored", "status", "unsent",
    )  # fmt: skip

    def __init__(self, record: Record) -> None:
        self._record = record
        self._call: ParsedRequest | None = None
        self._threaded: ThreadedReply | None = None
        self._ids: list[int] = []
        self.unsent: list[bytes] = []
        self.status = 200
        self.error: ServingError | None = None
        self.content_type = ""
        self.ignored: Sequence[str] = ()
        self.begun = False
        self.committed = False  # its first bytes are on their way: the status cannot change any more
        self.finished = False

    def take(self, limit: int | None = None) -> bytes:
        """The bytes to send now, at most `limit` and whole characters; possibly none."""
        unsent = self.unsent
        if not unsent:
            return b""
        data = unsent[0] if len(unsent) == 1 else b"".join(unsent)
        unsent.clear()
        if limit is not None and len(data) > limit:
            end = _cut(data, limit)
            unsent.append(data[end:])
            data = data[:end]
        self.committed = True
        return data

    def refuse(self, answer: HttpResponse, error: ServingError) -> None:
        """Nothing was sent yet: the whole answer is `answer`."""
        # Without its traceback, which names this place: a cycle.
        self.status, self.content_type, self.error = answer.status, answer.content_type, error.with_traceback(None)
        self.unsent.append(answer.body)
        self.begun = self.finished = True


def pieces(data: bytes, limit: int) -> Iterator[tuple[bytes, bool]]:
    """`data` in parts of at most `limit` bytes and whole characters, each with whether it is the last."""
    while len(data) > limit:
        end = _cut(data, limit)
        yield data[:end], False
        data = data[end:]
    yield data, True


def _cut(data: bytes, limit: int) -> int:
    """Where UTF-8 text may be cut, at `limit` or before."""
    while data[limit] & 0xC0 == 0x80:  # amid a character
        limit -= 1
    return limit
