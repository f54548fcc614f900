"""A recorded request, and the answers that the recording has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Recorded(NamedTuple):
    """The answer that a recording has.

    Attributes:
        status: HTTP's; 0 where the recording does not say.
        body: the bytes as sent.
    """

    status: int
    content_type: str
    body: bytes


class Request(NamedTuple):
    """A recorded request.

    Attributes:
        id: the source's; unique in a run.
        path: with the query, as `/v1/chat/completions`.
        headers: names in lower case; no credentials.
        at: seconds since the epoch, where recorded.
        other: a shadow variant's answer to the same event.
        unsendable: why it cannot be sent; empty: it can.
    """

    id: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    method: str = "POST"
    at: float | None = None
    answer: Recorded | None = None
    other: Recorded | None = None
    unsendable: str = ""


class Unreadable(NamedTuple):
    """Something of a source that is no request, and why.

    Attributes:
        place: file and line.
    """

    place: str
    reason: str
