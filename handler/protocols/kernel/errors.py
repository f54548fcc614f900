"""The error formats of dialects and of DJL Serving's front end."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict, final

from handler.core.errors import InvalidParameter, InvalidPayload, ServingError, TooLong
from handler.core.framing import JSON
from handler.protocols.kernel.schema import Count, NotRequired

Headers = Sequence[tuple[str, str]]


class HttpResponse(NamedTuple):
    """A complete HTTP response.

    Attributes:
        retry_after: the number of seconds to wait before a retry, or 0 if it is unknown.
        headers: the dialect's own headers.
    """

    status: int
    content_type: str
    body: bytes
    retry_after: float = 0.0
    headers: Headers = ()


_BUSY = frozenset({429, 503, 529})
WAIT = (1.0, 4.0)  # seconds


def retry_headers(status: int, retry_after: float = 0.0) -> Headers:
    """Return the headers that tell a client when to retry if the status is 429, 503 or 529, and no headers otherwise.

    Args:
        retry_after: the delay in seconds, or 0 if it is unknown.
    """
    return delay_headers(retry_after) if status in _BUSY else ()


def delay_headers(retry_after: float = 0.0) -> Headers:
    """Return the headers that tell a client when to retry.

    An unknown delay is chosen at random, because clients add no jitter and would otherwise all retry at once.
    The clients of OpenAI and Anthropic read the milliseconds, and other clients read the whole seconds.

    Args:
        retry_after: the delay in seconds, or 0 if it is unknown.
    """
    seconds = retry_after or random.uniform(*WAIT)
    return ("retry-after", str(math.ceil(seconds))), ("retry-after-ms", str(math.ceil(seconds * 1000)))


class FrontEndError(TypedDict):
    """The body of an error of DJL Serving's front end, with an additional field `error`."""

    code: Count
    type: str
    message: str
    error: NotRequired[str]


class ErrorFormat:
    """A dialect's error format.

    Attributes:
        statuses: maps a class of errors to the status in the dialect, if it differs from the error's own status.
    """

    statuses: Mapping[type[ServingError], int] = MappingProxyType({})

    def status(self, error: ServingError) -> int:
        """Return the HTTP status of an error.

        The first class in the MRO of the error that is in `statuses` or defines a status determines the status.
        """
        for kind in type(error).__mro__:
            if kind in self.statuses:
                return self.statuses[kind]
            if "status" in vars(kind):
                break
        return error.status

    def headers(self, error: ServingError) -> Headers:
        """Return the dialect's own headers for an error response."""
        return ()

    def body(self, error: ServingError) -> Any:
        """Render the body of an error response."""
        raise NotImplementedError

    def tail(self, error: ServingError) -> Any:
        """Render the last value of a stream that failed."""
        return self.body(error)

    def response(self, error: ServingError) -> HttpResponse:
        """Render the error response without the dialect's own headers. Override it for framings other than JSON."""
        return HttpResponse(self.status(error), JSON.content_type, JSON.encode(self.body(error)))

    @final
    def whole(self, error: ServingError) -> HttpResponse:
        """Return the error response with the dialect's own headers."""
        return self.response(error)._replace(headers=self.headers(error))


class FrontEndErrors(ErrorFormat):
    """The error format of DJL Serving's front end and of routes without a dialect.

    An invalid request that the handler refuses gets status 424, as in DJL Serving.
    """

    statuses = MappingProxyType({InvalidPayload: 424, InvalidParameter: 424, TooLong: 424})

    def body(self, error: ServingError) -> Any:
        """Render the body of an error in the same way as the front end."""
        message = error.message
        body: FrontEndError = {"code": self.status(error), "type": error.type, "message": message, "error": message}
        return body


class ServerErrors(FrontEndErrors):
    """The format of errors that occur before a request reaches a model. It has no `error` field."""

    def body(self, error: ServingError) -> FrontEndError:
        return {"code": self.status(error), "type": error.type, "message": error.message}


FRONT_END = FrontEndErrors()
SERVER = ServerErrors()
