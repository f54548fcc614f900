"""LMI's errors: of the payload, of the model, or of the server; and those of its other modes."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal, TypedDict

from handler.core.errors import InvalidParameter, InvalidPayload, InvalidSession, ServingError, TooLong
from handler.core.framing import JSON, Framing
from handler.protocols.kernel.errors import FrontEndError, FrontEndErrors
from handler.protocols.kernel.http_response import HttpResponse
from handler.protocols.kernel.schema.types import Count, NotRequired
from handler.protocols.lmi.answers import LmiToken


class LmiPayloadError(TypedDict):
    error: str
    code: Count


class LmiFailedDetails(TypedDict):
    finish_reason: Literal["error"]
    generated_tokens: None
    inputs: None
    tokens: NotRequired[None]


class LmiFailure(LmiPayloadError):
    """The body of a whole answer when the model fails."""

    generated_text: str
    details: LmiFailedDetails


class LmiFailedLine(LmiFailure):
    """The last line of a stream that broke off."""

    token: LmiToken


LmiError = LmiPayloadError | LmiFailure | FrontEndError


class BatchFailure(TypedDict):
    code: Count
    message: str
    error: str


BatchError = BatchFailure | FrontEndError


class AsyncFailure(TypedDict):
    message: str
    type: str
    param: None
    code: Count


class AsyncFailedLine(TypedDict):
    """The last line of a stream that broke off, as vLLM's."""

    error: AsyncFailure


AsyncError = LmiPayloadError | FrontEndError


class LmiErrors(FrontEndErrors):
    """LMI's rolling batch.

    Args:
        framing: of the answer that the request asks for; a failure of the model is framed so too.
    """

    def __init__(self, framing: Framing = JSON) -> None:
        self._framing = framing

    def framed(self, framing: Framing) -> LmiErrors:
        """Return the errors of a request that asks for this framing."""
        return LmiErrors(framing)

    def body(self, error: ServingError) -> LmiError:
        status = self.status(error)
        if isinstance(error, InvalidPayload):
            return {"error": error.message, "code": status}
        if status != 424:
            refusal: FrontEndError = super().body(error)
            return refusal
        return {
            "generated_text": "",
            "details": {"finish_reason": "error", "generated_tokens": None, "inputs": None, "tokens": None},
            "error": error.message,
            "code": status,
        }

    def tail(self, error: ServingError) -> LmiFailedLine:
        return {
            "token": {"id": -1, "text": "", "log_prob": -1, "special_token": True},
            "generated_text": "",
            "details": {"finish_reason": "error", "generated_tokens": None, "inputs": None},
            "error": error.message,
            "code": self.status(error),
        }

    def response(self, error: ServingError) -> HttpResponse:
        framing, status = self._framing, self.status(error)
        if framing is JSON or status != 424 or isinstance(error, InvalidPayload):
            return super().response(error)
        return HttpResponse(status, framing.content_type, framing.encode(self.tail(error)) + framing.end)


class BatchErrors(FrontEndErrors):
    """LMI's dynamic batch."""

    def body(self, error: ServingError) -> BatchError:
        return self.tail(error) if self.status(error) == 424 else super().body(error)

    def tail(self, error: ServingError) -> BatchFailure:
        return {"code": self.status(error), "message": "invoke handler failure", "error": error.message}


class AsyncErrors(FrontEndErrors):
    """LMI's async mode: vLLM's status for a prompt that is too long, else the worker's."""

    statuses = MappingProxyType({InvalidPayload: 424, InvalidParameter: 424, InvalidSession: 424, TooLong: 400})

    def body(self, error: ServingError) -> AsyncError:
        status = self.status(error)
        if status not in _OF_THE_WORKER:
            refusal: FrontEndError = super().body(error)
            return refusal
        message = error.message
        if isinstance(error, InvalidPayload | InvalidParameter | InvalidSession):
            message = f"Input parsing failed: {message.removeprefix('Bad request: ')}"  # which is AWS's beginning
        return {"error": message, "code": status}

    def tail(self, error: ServingError) -> AsyncFailedLine:
        return {"error": {"message": error.message, "type": "InternalServerError", "param": None, "code": 500}}


class AsyncPromptErrors(AsyncErrors):
    """Those of `inputs`: LMI answers 424 where a prompt is too long too."""

    statuses = MappingProxyType({**AsyncErrors.statuses, TooLong: 424})


_OF_THE_WORKER = frozenset({400, 404, 424})
"""Statuses of async mode that the front end passes on; it writes the others itself."""


class EmbeddingErrors(FrontEndErrors):
    """LMI's embeddings."""

    def body(self, error: ServingError) -> LmiPayloadError | FrontEndError:
        status = self.status(error)
        return {"error": error.message, "code": status} if status == 424 else super().body(error)
