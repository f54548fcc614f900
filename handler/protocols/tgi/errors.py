"""How TGI says that something failed: statuses, words, `error_type` (contract generate_apis.md, 1.4)."""

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
"""New tokens that TGI 3 checks against the model's limit; of more it makes as many as fit."""


class WrongType(InvalidPayload):
    """A wrong JSON type, or a field that is not there: the message begins with where it stands."""

    @property
    def public(self) -> str:
        return f"{self.message.partition(': ')[0]} has a wrong type"


class OutOfRange(InvalidParameter):
    """A value that breaks a limit, in TGI's words."""

    @property
    def public(self) -> str:
        return self.message.partition(": ")[0]


UNHEALTHY = {"error": "unhealthy", "error_type": "healthcheck"}
"""What a health check says of a server that cannot serve."""


class Failure(NamedTuple):
    """What is said of an error.

    Attributes:
        in_stream: it is an event under status 200 when the client asked for a stream, as in TGI; else it comes before
            TGI would look at what was asked for.
    """

    status: int
    error: str
    error_type: str
    in_stream: bool = True


def failure(error: ServingError, request: Request | None = None, *, begun: bool = False) -> Failure:
    """What TGI says of an error; where it says it in plain text, its text.

    Args:
        request: what was asked, where it was read.
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
    """TGI looks at the sum first; an answer without a limit of its own asks for what the prompt leaves."""
    most = error.most
    if isinstance(error, PromptTooLong):
        most += 1
        wanted = 0 if request is None or request.fill_context else min(request.sampling.max_new_tokens, SLICE)
        if error.num_prompt + wanted <= most:
            return f"`inputs` must have less than {error.most} tokens. Given: {error.given}"
    else:
        wanted = error.wanted
    shown = error.given if isinstance(error, PromptTooLong) else error.num_prompt
    given = f"Given: {shown} `inputs` tokens and {wanted} `max_new_tokens`"
    return f"`inputs` tokens + `max_new_tokens` must be <= {most}. {given}"
