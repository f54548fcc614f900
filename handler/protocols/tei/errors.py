"""TEI's errors: statuses and `error_type` (text-embeddings-inference 1, router/src/http/server.rs and lib.rs)."""

from __future__ import annotations

from typing import Any

from handler.core.errors import (
    BadRequest,
    InvalidParameter,
    InvalidPayload,
    NotJson,
    Overloaded,
    ServingError,
    TooLong,
    Unavailable,
)
from handler.core.framing import JSON
from handler.protocols.kernel.base import HttpResponse
from handler.protocols.kernel.texts import NoTexts, TooManyTexts
from handler.protocols.tei.answers import TeiError, TeiErrorType


def _status_and_type(error: ServingError) -> tuple[int, TeiErrorType]:
    match error:
        case NoTexts():
            return 400, "Empty"
        case TooManyTexts() | TooLong():
            return 413, "Validation"
        case NotJson():
            return 400, "Validation"
        case InvalidPayload() | InvalidParameter():
            return 422, "Validation"
        case Overloaded():
            return 429, "Overloaded"
        case Unavailable():
            return 503, "Unhealthy"
        case BadRequest():
            return error.status, "Validation"
    return error.status, "Validation" if error.kind == "validation" else "Backend"


def refused(error: ServingError, body: Any = None, context: Any = None) -> HttpResponse:
    """Render an error. The messages are this server's own."""
    status, kind = _status_and_type(error)
    value: TeiError = {"error": error.message, "error_type": kind}
    return HttpResponse(status, JSON.content_type, JSON.encode(value))
