"""Recorded requests, and recorded or live responses to them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Recorded(NamedTuple):
    """A recorded response.

    Attributes:
        status: the HTTP status, or 0 if the recording does not contain it.
        body: the bytes that were sent.
    """

    status: int
    content_type: str
    body: bytes


ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
"""The header with SageMaker's custom attributes, of which `route=` names a route of the container."""


class Request(NamedTuple):
    """A recorded request.

    Attributes:
        id: the ID in the recording, unique in a run.
        path: the path with its query string, such as `/v1/chat/completions`.
        headers: the headers, with lower-case names and without credentials.
        at: when it was sent, in seconds since the epoch, or None if the recording has no times.
        other: the response of a shadow variant to the same request.
        unsendable: the reason why the request cannot be sent, or "".
    """

    id: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    method: str = "POST"
    at: float | None = None
    response: Recorded | None = None
    other: Recorded | None = None
    unsendable: str = ""

    @property
    def route(self) -> str:
        """The route of the request, without a query string."""
        attribute = re.search(r"(?:^|[\s,;])route=(/[^\s,;?]*)", self.headers.get(ATTRIBUTES, ""))
        return attribute[1] if attribute else self.path.partition("?")[0]


class Unreadable(NamedTuple):
    """An item in a recording that cannot be read as a request, with the reason.

    Attributes:
        location: the file and the line.
    """

    location: str
    reason: str


# -- a response of a target, live or recorded --------------------------------------------------------------------------


EMULATED = "x-lmi-emulated-container"
"""The response header that names the container of an emulated account, and its name in an emulated data capture."""

BUSY = (429, 503)
"""HTTP statuses of a busy server, which may accept the request later."""


class Times(NamedTuple):
    """The times of a response, in seconds.

    Attributes:
        first: time to the first byte of the body.
        gap: mean time between pieces of the body, or None if there is only one piece.
        total: time to the end of the body.
    """

    first: float
    gap: float | None
    total: float


def times_of(start: float, arrivals: Sequence[float], end: float) -> Times:
    """Return the times of a response from the monotonic times of its start, pieces and end."""
    first = (arrivals[0] if arrivals else end) - start
    gap = (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1) if len(arrivals) > 1 else None
    return Times(first, gap, end - start)


class Response(NamedTuple):
    """The response of one side.

    Attributes:
        status: the HTTP status of the model server, or 0 if there was no response.
        content_type: the content type, or "" if it is unknown.
        lost: the reason why the response is missing or incomplete, or "".
        times: the times, or None if the response was recorded or is incomplete.
        throttled: the number of retries while the target was busy.
        by: what sent the response, as far as its headers say, such as `variant AllTraffic`, or "".
        container: the container of an emulated account, which serves all endpoints of the account, or "".
    """

    status: int
    content_type: str
    body: bytes
    lost: str = ""
    times: Times | None = None
    throttled: int = 0
    by: str = ""
    container: str = ""


def lost(reason: str) -> Response:
    return Response(0, "", b"", reason)


def recorded(response: Recorded) -> Response:
    """Convert a recorded response to a `Response`. An unknown status is replaced with 200."""
    return Response(response.status or 200, response.content_type, response.body)
