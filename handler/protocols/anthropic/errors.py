"""Anthropic's errors, `{"type": "error", "error": {"type", "message"}}`, and its statuses.

Source: Anthropic's API reference, "Errors".
"""

from __future__ import annotations

from types import MappingProxyType
from typing import ClassVar, Literal, TypedDict

from handler.core.errors import InvalidParameter, NotKept, Overloaded, PromptTooLong, ServingError
from handler.protocols.anthropic.words import in_own_words
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.schema.types import NotRequired


class AnthropicErrorDetails(TypedDict):
    error_code: str
    unsupported: NotRequired[list[str]]


class AnthropicErrorDetail(TypedDict):
    """`details` where a client knows what to do about the error."""

    type: str
    message: str
    details: NotRequired[AnthropicErrorDetails]


class AnthropicError(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorDetail


class ThreadsUnsupported(InvalidParameter):
    """The request leaves its conversation to the server.

    Anthropic's client sends the whole conversation, without `thread`, when it reads these `details`.
    """

    details: ClassVar[AnthropicErrorDetails] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


class ThreadNotFound(NotKept):
    """The message from which a thread goes on is not kept here.

    Anthropic's client sends the whole conversation, in another thread, when it reads these `details`.
    """

    details: ClassVar[AnthropicErrorDetails] = {"error_code": "thread_not_found"}


_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 529: "overloaded_error"}


class AnthropicErrors(ErrorFormat):
    """529 means that the client may come again soon."""

    statuses = MappingProxyType({ServingError: 500, Overloaded: 529})

    def body(self, error: ServingError) -> AnthropicError:
        """Render an error as a body, or as a stream's `error` event."""
        message = in_own_words(error.message)
        if isinstance(error, PromptTooLong):  # clients look for these words, and shorten the conversation then
            message = f"prompt is too long: {error.given} tokens > {error.most} maximum"
        status = self.status(error)
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        detail: AnthropicErrorDetail = {"type": kind, "message": message}
        if isinstance(error, ThreadsUnsupported | ThreadNotFound):
            detail["details"] = error.details
        return {"type": "error", "error": detail}


ERRORS = AnthropicErrors()
