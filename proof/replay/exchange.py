"""Recorded requests, and recorded or live answers to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Recorded(NamedTuple):
    """Recorded answer.

    Attributes:
        status: the HTTP status, or 0 if the recording does not contain it.
        body: bytes as they were sent.
    """

    status: int
    content_type: str
    body: bytes


class Request(NamedTuple):
    """Recorded request.

    Attributes:
        id: id in the recording, unique in a run.
        path: path with its query, such as `/v1/chat/completions`.
        headers: headers with lower-case names, without credentials.
        at: seconds since the epoch, or None if the recording has no times.
        other: a shadow variant's answer to the same request.
        unsendable: reason why the request cannot be sent, or "".
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
    """Item of a recording that cannot be read as a request, with the reason.

    Attributes:
        place: file and line.
    """

    place: str
    reason: str


# -- an answer of a target, live or recorded ---------------------------------------------------------------------------


BUSY = (429, 503)
"""Statuses of a server that may accept the request later."""


class Times(NamedTuple):
    """Times of an answer in seconds.

    Attributes:
        first: time to the first byte of the body.
        gap: mean time between pieces of the body, or None if there is only one piece.
        total: time to the end of the body.
    """

    first: float
    gap: float | None
    total: float


def times_of(start: float, arrivals: Sequence[float], end: float) -> Times:
    """Return the times of an answer from the monotonic times of its start, its pieces and its end."""
    first = (arrivals[0] if arrivals else end) - start
    gap = (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1) if len(arrivals) > 1 else None
    return Times(first, gap, end - start)


class Answer(NamedTuple):
    """Answer of one side.

    Attributes:
        status: the HTTP status of the model's server, or 0 if there was no answer.
        content_type: content type, or "" if it is unknown.
        lost: reason why the answer is missing or incomplete, or "".
        times: times, or None if the answer was recorded or is incomplete.
        throttled: number of retries because the target was busy.
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
    """Convert a recorded response to an `Answer`."""
    return Answer(answer.status or 200, answer.content_type, answer.body)
