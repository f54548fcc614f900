"""Anthropic's errors, `{"type": "error", "error": {"type", "message"}}`, and its statuses.

Source: Anthropic's API reference, "Errors".
"""

from __future__ import annotations

from typing import ClassVar

from handler.core.errors import (
    BadRequest,
    InvalidParameter,
    InvalidPayload,
    NotFound,
    Overloaded,
    PromptTooLong,
    ServingError,
    TooLarge,
    TooLong,
    TooSlow,
    Unauthorized,
    Unavailable,
    UnsupportedMedia,
)
from handler.core.framing import JSON, named_event
from handler.protocols.anthropic.answers import AnthropicError, AnthropicErrorDetail, AnthropicErrorDetails
from handler.protocols.anthropic.words import in_own_words
from handler.protocols.kernel.base import HttpResponse


class ThreadsUnsupported(InvalidParameter):
    """The request leaves its conversation to the server.

    Anthropic's client sends the whole conversation, without `thread`, when it reads these `details`.
    """

    details: ClassVar[AnthropicErrorDetails] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def classify(error: ServingError) -> tuple[int, str]:
    """Return the status and the type of an error. 529 means that the client may come again soon."""
    match error:
        case InvalidPayload() | InvalidParameter() | TooLong():
            return 400, "invalid_request_error"
        case Unauthorized():
            return 401, "authentication_error"
        case NotFound():
            return 404, "not_found_error"
        case TooLarge():
            return 413, "request_too_large"
        case BadRequest() | UnsupportedMedia() | TooSlow():
            return error.status, "invalid_request_error"
        case Overloaded():
            return 529, "overloaded_error"
        case Unavailable():
            return error.status, "api_error"
    return 500, "api_error"


def failure(error: ServingError) -> AnthropicError:
    """Render an error as a body, or as a stream's `error` event."""
    message = in_own_words(error.message)
    if isinstance(error, PromptTooLong):  # clients look for these words, and shorten the conversation then
        message = f"prompt is too long: {error.given} tokens > {error.most} maximum"
    detail: AnthropicErrorDetail = {"type": classify(error)[1], "message": message}
    if isinstance(error, ThreadsUnsupported):
        detail["details"] = error.details
    return {"type": "error", "error": detail}


def refused(error: ServingError, body: object = None) -> HttpResponse:
    return HttpResponse(classify(error)[0], JSON.content_type, JSON.encode(failure(error)))


def stream_end(error: ServingError) -> bytes:
    """Render the end of a stream that broke off."""
    return named_event(failure(error))
