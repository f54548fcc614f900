"""OpenAI's errors, `{"error": {"message", "type", "param", "code"}}`, and the statuses that its clients know."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TypedDict

from handler.core.errors import (
    InvalidParameter,
    InvalidPayload,
    ModelNotFound,
    NotKept,
    Overloaded,
    ServingError,
    TooLong,
    Unauthorized,
)
from handler.protocols.kernel.errors import ErrorFormat


class OpenAiErrorFields(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAiError(TypedDict):
    error: OpenAiErrorFields


_INVALID = "invalid_request_error"

_NAME = re.compile(r"'([\w.\[\]]+)'|([\w.\[\]]+)[=:]|((?:messages|tools)\[\d+\][\w.\[\]]*)")
"""The field at the start of a message: 'NAME', NAME=VALUE, NAME: or messages[0].content."""


def field_of(message: str) -> str | None:
    """Return the field that a message begins with."""
    match = _NAME.match(message)
    return next(filter(None, match.groups())) if match else None


class OpenAiErrors(ErrorFormat):
    """By the status openai's clients choose their exception."""

    statuses = MappingProxyType({ServingError: 500, Overloaded: 429})

    def body(self, error: ServingError) -> OpenAiError:
        number = self.status(error)
        param, code = None, None
        if isinstance(error, InvalidPayload | InvalidParameter | TooLong):
            param = field_of(error.message)
        if isinstance(error, TooLong):
            code = "context_length_exceeded"
        elif isinstance(error, ModelNotFound):
            param, code = "model", "model_not_found"
        elif isinstance(error, NotKept):
            param = error.param or None
            code = "previous_response_not_found" if param == "previous_response_id" else None
        elif isinstance(error, Unauthorized):
            code = "invalid_api_key"
        elif number == 429:
            code = "rate_limit_exceeded"
        kind = _INVALID if number < 500 and number != 429 else "rate_limit_error" if number == 429 else "server_error"
        return {"error": {"message": error.message, "type": kind, "param": param, "code": code}}


ERRORS = OpenAiErrors()
