"""Errors as a dialect writes them, and as DJL Serving's front end does."""

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
    """A whole HTTP response.

    Attributes:
        retry_after: seconds after which the client may retry; 0 if unknown.
        headers: the dialect's own.
    """

    status: int
    content_type: str
    body: bytes
    retry_after: float = 0.0
    headers: Headers = ()


_BUSY = frozenset({429, 503, 529})
_WAIT = (1.0, 4.0)  # seconds


def retry_headers(status: int, retry_after: float = 0.0) -> Headers:
    """Return the headers that say when to retry; none for statuses that a retry cannot cure. An unknown time is
    random, since clients add no jitter: those refused together would retry together. OpenAI's and Anthropic's clients
    read the milliseconds, others whole seconds.

    Args:
        retry_after: seconds; 0 if unknown.
    """
    if status not in _BUSY:
        return ()
    seconds = retry_after or random.uniform(*_WAIT)
    return ("retry-after", str(math.ceil(seconds))), ("retry-after-ms", str(math.ceil(seconds * 1000)))


class FrontEndError(TypedDict):
    """The error of DJL Serving's front end (`code`, `type`, `message`), with our `error`."""

    code: Count
    type: str
    message: str
    error: NotRequired[str]


class ErrorFormat:
    """A dialect's form of errors.

    Attributes:
        statuses: class of error -> the dialect's status, if it differs from the error's own.
    """

    statuses: Mapping[type[ServingError], int] = MappingProxyType({})

    def status(self, error: ServingError) -> int:
        """Return the status of the nearest base class that has one, in the dialect's table or its own."""
        for kind in type(error).__mro__:
            if kind in self.statuses:
                return self.statuses[kind]
            if "status" in vars(kind):
                break
        return error.status

    def headers(self, error: ServingError) -> Headers:
        """Return the dialect's own headers of an answer that is only the error."""
        return ()

    def body(self, error: ServingError) -> Any:
        """Render the body of an answer that is only the error."""
        raise NotImplementedError

    def tail(self, error: ServingError) -> Any:
        """Render the last value of a stream that failed."""
        return self.body(error)

    def response(self, error: ServingError) -> HttpResponse:
        """Render status and body of an answer if nothing has been sent. Override it for other framings."""
        return HttpResponse(self.status(error), JSON.content_type, JSON.encode(self.body(error)))

    @final
    def whole(self, error: ServingError) -> HttpResponse:
        """Return the answer if nothing has been sent, with the dialect's own headers."""
        return self.response(error)._replace(headers=self.headers(error))


class FrontEndErrors(ErrorFormat):
    """The form of errors of DJL Serving's front end, and of routes that have no dialect. A handler's own refusals
    have 424 there.
    """

    statuses = MappingProxyType({InvalidPayload: 424, InvalidParameter: 424, TooLong: 424})

    def body(self, error: ServingError) -> Any:
        """Render an error as the front end renders a request that it refuses."""
        message = error.message
        body: FrontEndError = {"code": self.status(error), "type": error.type, "message": message, "error": message}
        return body


class ServerErrors(FrontEndErrors):
    """The form of errors that the front end finds before a request reaches a model: the body has no field `error`."""

    def body(self, error: ServingError) -> FrontEndError:
        return {"code": self.status(error), "type": error.type, "message": error.message}


FRONT_END = FrontEndErrors()
SERVER = ServerErrors()
