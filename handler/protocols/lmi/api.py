"""The types of LMI's responses. They declare every field on the wire, for mypy and the OpenAPI document."""

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
    """A sequence in `best_of_sequences`."""

    finish_reason: FinishReason
    generated_tokens: Count
    tokens: list[LmiToken]
    generated_text: str


class LmiDetails(LmiTops):
    """The details of a response. In the last line of a stream, they have no `tokens`."""

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
    """A line of a stream. Only the last line has `generated_text` and, on request, `details`."""

    token: LmiToken
    top_tokens: NotRequired[list[LmiToken]]
    outputs: NotRequired[TensorValues]
    generated_text: NotRequired[str]
    details: NotRequired[LmiDetails]


# -- dynamic batch -----------------------------------------------------------------------------------------------


class BatchText(TypedDict):
    generated_text: str


class BatchLine(TypedDict):
    """A line in the stream of a dynamic batch, with one text per prompt."""

    outputs: list[str]


# -- async mode --------------------------------------------------------------------------------------------------


class AsyncToken(TypedDict):
    id: int
    text: str
    logprob: float | None


class AsyncDetails(TypedDict):
    """The details of a response. `prefill` is empty or, on request, has all tokens of the prompt except the first."""

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
    """A line of a stream. `generated_text` is null before the last line. `details` is also null unless requested."""

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
    """A part of a streamed message. The first part contains the role."""

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


# -- errors of LMI's modes ---------------------------------------------------------------------------------------------


class LmiPayloadError(TypedDict):
    error: str
    code: Count


class LmiFailedDetails(TypedDict):
    finish_reason: Literal["error"]
    generated_tokens: None
    inputs: None
    tokens: NotRequired[None]


class LmiFailure(LmiPayloadError):
    """The body of a non-streaming error with status 424, unless the request body is invalid."""

    generated_text: str
    details: LmiFailedDetails


class LmiFailedLine(LmiFailure):
    """The last line of a failed stream."""

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
    """The last line of a failed stream, in the format of vLLM's errors."""

    error: AsyncFailure


AsyncError = LmiPayloadError | FrontEndError


class LmiErrors(FrontEndErrors):
    """The errors of LMI's rolling batch.

    Args:
        framing: the framing of the requested response. An error with status 424 has the same framing unless the
            request body is invalid.
    """

    def __init__(self, framing: Framing = JSON) -> None:
        self._framing = framing

    def framed(self, framing: Framing) -> LmiErrors:
        """Return the error format for a request whose response has this framing."""
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


class DynamicBatchErrors(FrontEndErrors):
    """The errors of LMI's dynamic batch."""

    def body(self, error: ServingError) -> BatchError:
        return self.tail(error) if self.status(error) == 424 else super().body(error)

    def tail(self, error: ServingError) -> BatchFailure:
        return {"code": self.status(error), "message": "invoke handler failure", "error": error.message}


class AsyncErrors(FrontEndErrors):
    """Errors in LMI's async mode, with the worker's statuses. A prompt that is too long gets status 400, as in vLLM."""

    statuses = MappingProxyType({InvalidPayload: 424, InvalidParameter: 424, InvalidSession: 424, TooLong: 400})

    def body(self, error: ServingError) -> AsyncError:
        status = self.status(error)
        if status not in _OF_THE_WORKER:
            refusal: FrontEndError = super().body(error)
            return refusal
        message = error.message
        if isinstance(error, InvalidPayload | InvalidParameter | InvalidSession):
            message = f"Input parsing failed: {message.removeprefix('Bad request: ')}"  # AWS's own prefix
        return {"error": message, "code": status}

    def tail(self, error: ServingError) -> AsyncFailedLine:
        return {"error": {"message": error.message, "type": "InternalServerError", "param": None, "code": 500}}


class AsyncPromptErrors(AsyncErrors):
    """Errors of requests with `inputs` in async mode. A prompt that is too long gets status 424, too."""

    statuses = MappingProxyType({**AsyncErrors.statuses, TooLong: 424})


_OF_THE_WORKER = frozenset({400, 404, 424})
"""Statuses in async mode for which the worker writes the body. For other statuses, the front end writes it."""


class EmbeddingErrors(FrontEndErrors):
    """The errors of LMI's embeddings."""

    def body(self, error: ServingError) -> LmiPayloadError | FrontEndError:
        status = self.status(error)
        return {"error": error.message, "code": status} if status == 424 else super().body(error)
