"""OpenAI's errors, `{"error": {"message", "type", "param", "code"}}`, and the statuses that its clients know."""

from __future__ import annotations

import re
from typing import Any

from handler.core.errors import (
    BadRequest,
    InvalidParameter,
    InvalidPayload,
    ModelNotFound,
    Overloaded,
    ServingError,
    TooLarge,
    TooLong,
    TooSlow,
    Unauthorized,
    Unavailable,
    UnsupportedMedia,
)
from handler.core.framing import JSON, SSE_DONE
from handler.protocols.kernel.base import HttpResponse
from handler.protocols.openai.answers import OpenAiError

_INVALID = "invalid_request_error"

_NAME = re.compile(r"'([\w.\[\]]+)'|([\w.\[\]]+)[=:]|((?:messages|tools)\[\d+\][\w.\[\]]*)")
"""The field at the start of a message: 'NAME', NAME=VALUE, NAME: or messages[0].content."""


def status(error: ServingError) -> int:
    """Return the HTTP status, by which openai's clients choose their exception."""
    if isinstance(error, InvalidPayload | InvalidParameter | TooLong):
        return 400
    if isinstance(error, Overloaded):
        return 429
    if isinstance(error, Unavailable | BadRequest | UnsupportedMedia | TooLarge | TooSlow):
        return error.status
    return 500


def failure(error: ServingError) -> OpenAiError:
    """Render an error as a body, or as a value of a stream."""
    number = status(error)
    param, code = None, None
    if isinstance(error, InvalidPayload | InvalidParameter | TooLong) and (match := _NAME.match(error.message)):
        param = next(filter(None, match.groups()))
    if isinstance(error, TooLong):
        code = "context_length_exceeded"
    elif isinstance(error, ModelNotFound):
        param, code = "model", "model_not_found"
    elif isinstance(error, Unauthorized):
        code = "invalid_api_key"
    elif number == 429:
        code = "rate_limit_exceeded"
    kind = _INVALID if number < 500 and number != 429 else "rate_limit_error" if number == 429 else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": param, "code": code}}


def refused(error: ServingError, body: Any = None) -> HttpResponse:
    return HttpResponse(status(error), JSON.content_type, JSON.encode(failure(error)))


def stream_end(error: ServingError) -> bytes:
    """Render the end of a stream that broke off."""
    return SSE_DONE.encode(failure(error)) + SSE_DONE.end
