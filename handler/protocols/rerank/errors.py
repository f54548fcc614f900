"""Cohere's errors, `{"message"}`, and the statuses by which its client chooses an exception (cohere 7)."""

from __future__ import annotations

from handler.core.errors import (
    BadRequest,
    InvalidParameter,
    InvalidPayload,
    Overloaded,
    ServingError,
    TooLarge,
    TooLong,
    TooSlow,
    Unavailable,
    UnsupportedMedia,
)
from handler.core.framing import JSON
from handler.protocols.base import HttpResponse
from handler.protocols.rerank.answers import RerankError


def _status(error: ServingError) -> int:
    if isinstance(error, InvalidPayload | InvalidParameter | TooLong):
        return 400
    if isinstance(error, Overloaded):
        return 429
    if isinstance(error, Unavailable | BadRequest | UnsupportedMedia | TooLarge | TooSlow):
        return error.status
    return 500


def refused(error: ServingError) -> HttpResponse:
    value: RerankError = {"message": error.message}
    return HttpResponse(_status(error), JSON.content_type, JSON.encode(value))
