"""Triton's errors: `{"error"}` under few statuses."""

from __future__ import annotations

from types import MappingProxyType
from typing import TypedDict

from handler.core.errors import (
    GenerationFailed,
    InvalidPayload,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    NotJson,
    ServingError,
    TooLarge,
    UnsupportedMedia,
)
from handler.core.framing import SSE
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.http_response import HttpResponse


class TritonError(TypedDict):
    error: str


EVENTS = SSE._replace(content_type="text/event-stream; charset=utf-8")


class OneResponse(InvalidPayload):
    """`/generate` was asked for a stream. Triton answers it with status 200, because a response came."""

    status = 200

    def __init__(self) -> None:
        super().__init__(
            "generate expects model to produce exactly 1 response, use generate stream for model that generates "
            "various number of responses"
        )


class TritonErrors(ErrorFormat):
    """Triton has 500 for values of a wrong type and for bodies that are not JSON; its own document says 400.

    Args:
        events: a failure of the model is an event.
    """

    statuses = MappingProxyType({ServingError: 400, UnsupportedMedia: 400, TooLarge: 400})

    def __init__(self, *, events: bool = False) -> None:
        self._events = events

    def body(self, error: ServingError) -> TritonError:
        message = error.message
        if isinstance(error, NotJson):
            message = f"failed to parse the request JSON buffer: {message}"
        elif isinstance(error, MethodNotAllowed):
            message = "Method Not Allowed"
        elif isinstance(error, NotFound):
            message = _not_found(error)
        return {"error": message}

    def response(self, error: ServingError) -> HttpResponse:
        if self._events and isinstance(error, GenerationFailed):
            return HttpResponse(self.status(error), EVENTS.content_type, EVENTS.encode(self.body(error)))
        return super().response(error)


ERRORS = TritonErrors()


def _not_found(error: NotFound) -> str:
    if not isinstance(error, ModelNotFound):
        return error.message
    if error.version in ("", "1"):
        return f"Request for unknown model: '{error.name}' is not found{error.served}"
    if error.version.isascii() and error.version.isdecimal():
        return f"Request for unknown model: '{error.name}' version {error.version} is not found"
    return "Not Found"  # Triton's routes have versions of digits only
