"""A recorded request, as each source yields it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Recorded(NamedTuple):
    """The answer that a recording has.

    Args:
        status: HTTP's; 0 if unknown.
        body: bytes as sent.
    """

    status: int
    content_type: str
    body: bytes


class Request(NamedTuple):
    """A request of a recording.

    Args:
        id: of the source; unique in a run.
        path: with its query, such as "/invocations".
        headers: content-type, accept, x-amzn-sagemaker-custom-attributes and such; no credentials.
        at: seconds since the epoch, where recorded.
        other: a shadow variant's answer to the same event: then nothing is sent.
    """

    id: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    method: str = "POST"
    at: float | None = None
    answer: Recorded | None = None
    other: Recorded | None = None


class Unreadable(NamedTuple):
    """A part of a recording that is no request: counted and named, and the run goes on."""

    place: str
    reason: str
