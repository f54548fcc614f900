"""A recorded request, and an answer to it, live or recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Recorded(NamedTuple):
    """A recorded answer.

    Attributes:
        status: HTTP's; 0 if the recording does not say.
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
    """An item of a source that is not a request, with the reason.

    Attributes:
        place: file and line.
    """

    place: str
    reason: str


# -- an answer of a target, live or recorded ---------------------------------------------------------------------------


BUSY = (429, 503)
"""Statuses of a server that will accept the request later."""


class Times(NamedTuple):
    """Seconds: to the first byte of the body, between its pieces on average (None: there is one piece), and to its
    end.
    """

    first: float
    gap: float | None
    total: float


def times_of(start: float, arrivals: Sequence[float], end: float) -> Times:
    """Return the times of an answer, whose pieces came at `arrivals`."""
    first = (arrivals[0] if arrivals else end) - start
    gap = (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1) if len(arrivals) > 1 else None
    return Times(first, gap, end - start)


class Answer(NamedTuple):
    """The answer of one side.

    Args:
        status: HTTP's, of the model's server; 0: none.
        content_type: empty: unknown.
        lost: why there is no whole answer; empty: there is one.
        times: None: recorded, or lost.
        throttled: how often it was sent again, as the target was busy.
    """

    status: int
    content_type: str
    body: bytes
    lost: str = ""
    times: Times | None = None
    throttled: int = 0


def lost(reason: str) -> Answer:
    return Answer(0, "", b"", reason)


def recorded(answer: Recorded) -> Answer:
    """Return a recording's answer as one of a target."""
    return Answer(answer.status or 200, answer.content_type, answer.body)
