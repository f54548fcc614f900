"""The types of LMI's answers. Each field of the wire is declared here, for mypy and for the API's document."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Literal, TypedDict

from handler.core.errors import InvalidParameter, InvalidPayload, InvalidSession, ServingError, TooLong
from handler.core.framing import JSON, Framing
from handler.protocols.kernel.errors import FrontEndError, FrontEndErrors, HttpResponse
from handler.protocols.kernel.schema import Count, NotRequired
from handler.protocols.kernel.tensors import TensorValues
from handler.protocols.openai.api import ChatLogprobs, MessageParts, StreamUsage, TokenUsage, ToolCallPart

FinishReason = Annotated[str, ("enum", ("length", "eos_token", "stop_sequence"))]

AsyncFinishReason = Annotated[str, ("enum", ("length", "stop"))]


class LmiToken(TypedDict):
    id: int
    text: str
    log_prob: float | None
    special_token: NotRequired[bool]


class LmiTops(TypedDict, total=False):
    """The alternatives to each token, on request."""

    top_tokens: list[list[LmiToken]]


class LmiSequence(LmiTops):
    """One of `best_of_sequences`."""

    finish_reason: FinishReason
    generated_tokens: Count
    tokens: list[LmiToken]
    generated_text: str


class LmiDetails(LmiTops):
    """The details of an answer; those in a stream's last line have no `tokens`."""

    finish_reason: FinishReason
    generated_tokens: Count
    inputs: str
    tokens: NotRequired[list[LmiToken]]
    prefill: NotRequired[list[LmiToken]]
    best_of_sequences: NotRequired[list[LmiSequence]]


class LmiAnswer(TypedDict):
    generated_text: str
    details: NotRequired[LmiDetails]
    outputs: NotRequired[TensorValues]


class LmiLine(TypedDict):
    """A line of a stream. The last one has `generated_text` and, on demand, `details`."""

    token: LmiToken
    top_tokens: NotRequired[list[LmiToken]]
    outputs: NotRequired[TensorValues]
    generated_text: NotRequired[str]
    details: NotRequired[LmiDetails]


# -- dynamic batch -----------------------------------------------------------------------------------------------


class BatchText(TypedDict):
    generated_text: str


class BatchLine(TypedDict):
    """A line of a stream."""

    outputs: list[str]


# -- async mode --------------------------------------------------------------------------------------------------


class AsyncToken(TypedDict):
    id: int
    text: str
    logprob: float | None


class AsyncDetails(TypedDict):
    """The details of an answer: on request, `prefill` has the prompt's tokens except the first; `seed` is the
    request's.
    """

    finish_reason: AsyncFinishReason
    generated_tokens: Count
    seed: int | None
    prefill: list[AsyncToken]
    tokens: list[AsyncToken]


class AsyncAnswer(TypedDict):
    generated_text: str
    details: NotRequired[AsyncDetails]


class AsyncStreamDetails(TypedDict):
    finish_reason: AsyncFinishReason
    seed: int | None
    generated_tokens: Count
    input_length: Count


class AsyncLine(TypedDict):
    """A line of a stream; the last one has `generated_text` and, on request, `details`."""

    index: Count
    token: AsyncToken
    generated_text: str | None
    details: AsyncStreamDetails | None


# -- chat --------------------------------------------------------------------------------------------------------


ChatFinishReason = Annotated[str, ("enum", ("length", "eos_token", "stop_sequence", "tool_calls"))]


class LmiMessage(MessageParts):
    role: Literal["assistant"]
    content: str | None


class LmiMessagePart(TypedDict, total=False):
    """A piece of a stream; the first one has the role."""

    content: str
    reasoning: str
    reasoning_content: str
    tool_calls: list[ToolCallPart]
    role: Literal["assistant"]


class LmiChatChoice(TypedDict):
    index: Count
    message: LmiMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class LmiChatPart(TypedDict):
    index: Count
    delta: LmiMessagePart
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class LmiChatAnswer(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: Count
    choices: list[LmiChatChoice]
    usage: TokenUsage


class LmiChatChunk(StreamUsage):
    id: str
    object: Literal["chat.completion.chunk"]
    created: Count
    choices: list[LmiChatPart]


# -- LMI's errors: of the payload, of the model, or of the server; and those of its other modes ------------------------


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
    """The last line of a stream that failed."""

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
    """The last line of a stream that failed, in the form of vLLM's errors."""

    error: AsyncFailure


AsyncError = LmiPayloadError | FrontEndError


class LmiErrors(FrontEndErrors):
    """Errors of LMI's rolling batch.

    Args:
        framing: of the answer that the request asks for; a failure of the model is framed in the same way.
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
    """Errors of LMI's dynamic batch."""

    def body(self, error: ServingError) -> BatchError:
        return self.tail(error) if self.status(error) == 424 else super().body(error)

    def tail(self, error: ServingError) -> BatchFailure:
        return {"code": self.status(error), "message": "invoke handler failure", "error": error.message}


class AsyncErrors(FrontEndErrors):
    """Errors of LMI's async mode: vLLM's status for a prompt that is too long, else the worker's."""

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
    """Errors of requests with `inputs`: LMI answers 424 also if a prompt is too long."""

    statuses = MappingProxyType({**AsyncErrors.statuses, TooLong: 424})


_OF_THE_WORKER = frozenset({400, 404, 424})
"""Statuses of async mode that the front end passes on; it writes the others itself."""


class EmbeddingErrors(FrontEndErrors):
    """Errors of LMI's embeddings."""

    def body(self, error: ServingError) -> LmiPayloadError | FrontEndError:
        status = self.status(error)
        return {"error": error.message, "code": status} if status == 424 else super().body(error)
