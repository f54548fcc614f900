"""TGI's errors: statuses, messages, `error_type` (text-generation-inference 3, router/src/server.rs)."""

from __future__ import annotations

from typing import NamedTuple

from handler.core.errors import (
    AnswerTooLong,
    GenerationFailed,
    InternalError,
    InvalidParameter,
    InvalidPayload,
    MethodNotAllowed,
    NotJson,
    Overloaded,
    PromptTooLong,
    ServingError,
    TooLarge,
    Unavailable,
    UnsupportedMedia,
)
from handler.core.values import Request

SLICE = 1024
"""New tokens that TGI 3 checks against the model's limit. Of a larger number it generates as many as fit."""


class WrongType(InvalidPayload):
    """A wrong JSON type, or a missing field. The message begins with the field's path."""

    @property
    def public(self) -> str:
        return f"{self.message.partition(': ')[0]} has a wrong type"


class OutOfRange(InvalidParameter):
    """A value out of range, in TGI's words."""

    @property
    def public(self) -> str:
        return self.message.partition(": ")[0]


UNHEALTHY = {"error": "unhealthy", "error_type": "healthcheck"}
"""The body of a health check that fails."""


class Failure(NamedTuple):
    """The rendering of an error.

    Attributes:
        in_stream: a request for a stream gets it as an event under status 200, as in TGI. Otherwise TGI fails before it
            reads what the client asks for.
    """

    status: int
    error: str
    error_type: str
    in_stream: bool = True


def failure(error: ServingError, request: Request | None = None, *, begun: bool = False) -> Failure:
    """Render an error as TGI does; where TGI answers plain text, return its text.

    Args:
        request: the request, as far as it was read.
        begun: the answer has begun.
    """
    match error:
        case NotJson():
            return Failure(400, f"Failed to parse the request body as JSON: {error.message}", "validation", False)
        case WrongType():
            what = "Failed to deserialize the JSON body into the target type"
            return Failure(422, f"{what}: {error.message}", "validation", False)
        case UnsupportedMedia() | TooLarge() | MethodNotAllowed():
            return Failure(error.status, error.message, error.kind, False)
        case PromptTooLong() | AnswerTooLong():
            return Failure(422, f"Input validation error: {_too_long(error, request)}", "validation")
        case InvalidPayload() | InvalidParameter():
            return Failure(422, f"Input validation error: {error.message}", "validation")
        case Overloaded():
            return Failure(429, "Model is overloaded", "overloaded")
        case Unavailable() if begun:  # the server stops
            return Failure(500, "Incomplete generation", "incomplete_generation")
        case Unavailable():
            return Failure(503, error.message, "healthcheck", False)
        case InternalError():
            return Failure(500, error.message, "incomplete_generation")
        case GenerationFailed():
            return Failure(424, f"Request failed during generation: {error.message}", "generation")
    return Failure(error.status, error.message, error.kind, False)


def _too_long(error: PromptTooLong | AnswerTooLong, request: Request | None) -> str:
    """Describe the excess. TGI checks the sum first; a request without a limit takes what the prompt leaves."""
    most = error.most
    if isinstance(error, PromptTooLong):
        most += 1
        wanted = 0 if request is None or request.fill_context else min(request.sampling.max_new_tokens, SLICE)
        if error.num_prompt + wanted <= most:
            return f"`inputs` must have less than {error.most} tokens. Given: {error.given}"
    else:
        wanted = error.wanted
    num_prompt = error.given if isinstance(error, PromptTooLong) else error.num_prompt
    given = f"Given: {num_prompt} `inputs` tokens and {wanted} `max_new_tokens`"
    return f"`inputs` tokens + `max_new_tokens` must be <= {most}. {given}"
