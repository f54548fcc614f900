"""vLLM's errors: `{"error": {"message", "type", "param", "code"}}`, where `code` is the status."""

from __future__ import annotations

from types import MappingProxyType
from typing import TypedDict

from handler.core.errors import (
    AdapterFailed,
    Conflict,
    InvalidParameter,
    InvalidPayload,
    Overloaded,
    ServingError,
    TooLong,
)
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.schema.types import Count
from handler.protocols.openai.errors import field_of


class VllmErrorFields(TypedDict):
    message: str
    type: str
    param: str | None
    code: Count


class VllmError(TypedDict):
    error: VllmErrorFields


_TYPES = {
    400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 429: "TooManyRequestsError",
    501: "NotImplementedError", 503: "ServiceUnavailableError",
}  # fmt: skip


class VllmErrors(ErrorFormat):
    statuses = MappingProxyType({ServingError: 500, Overloaded: 429, Conflict: 400, AdapterFailed: 400})

    def body(self, error: ServingError) -> VllmError:
        status = self.status(error)
        kind = _TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
        param = field_of(error.message) if isinstance(error, InvalidPayload | InvalidParameter | TooLong) else None
        return {"error": {"message": error.message, "type": kind, "param": param, "code": status}}


ERRORS = VllmErrors()
