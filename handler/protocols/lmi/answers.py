"""The types of LMI's answers. Each field of the wire is declared here, for mypy and for the API's document."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from handler.protocols.base import Count, FrontEndError
from handler.protocols.openai.answers import ChatLogprobs, TokenUsage

FinishReason = Annotated[str, ("enum", ("length", "eos_token", "stop_sequence"))]


class _LmiToken(TypedDict):
    id: int
    text: str
    log_prob: float | None


class LmiToken(_LmiToken, total=False):
    special_token: bool


class _LmiSequence(TypedDict):
    finish_reason: FinishReason
    generated_tokens: Count
    tokens: list[LmiToken]
    generated_text: str


class LmiSequence(_LmiSequence, total=False):
    """One of `best_of_sequences`."""

    top_tokens: list[list[LmiToken]]


class _LmiDetails(TypedDict):
    finish_reason: FinishReason
    generated_tokens: Count
    inputs: str


class LmiDetails(_LmiDetails, total=False):
    """The last line of a stream has no `tokens`."""

    tokens: list[LmiToken]
    prefill: list[LmiToken]
    top_tokens: list[list[LmiToken]]
    best_of_sequences: list[LmiSequence]


class _LmiAnswer(TypedDict):
    generated_text: str


class LmiAnswer(_LmiAnswer, total=False):
    details: LmiDetails
    outputs: dict[str, Any]


class _LmiLine(TypedDict):
    token: LmiToken


class LmiLine(_LmiLine, total=False):
    """A line of a stream. The last one has `generated_text` and, on demand, `details`."""

    top_tokens: list[LmiToken]
    outputs: dict[str, Any]
    generated_text: str
    details: LmiDetails


class LmiPayloadError(TypedDict):
    error: str
    code: Count


class _LmiFailedDetails(TypedDict):
    finish_reason: Literal["error"]
    generated_tokens: None
    inputs: None


class LmiFailedDetails(_LmiFailedDetails, total=False):
    tokens: None


class LmiFailure(LmiPayloadError):
    """A whole answer that the model failed to give."""

    generated_text: str
    details: LmiFailedDetails


class LmiFailedLine(LmiFailure):
    """The last line of a stream that broke off."""

    token: LmiToken


LmiError = LmiPayloadError | LmiFailure | FrontEndError


# -- dynamic batch -----------------------------------------------------------------------------------------------


class BatchText(TypedDict):
    generated_text: str


class BatchLine(TypedDict):
    """A line of a stream."""

    outputs: list[str]


class BatchFailure(TypedDict):
    code: Count
    message: str
    error: str


BatchError = BatchFailure | FrontEndError


# -- chat --------------------------------------------------------------------------------------------------------


class LmiMessage(TypedDict):
    role: Literal["assistant"]
    content: str


class LmiMessagePart(TypedDict, total=False):
    """A piece of a stream; the first one has the role."""

    content: str
    role: Literal["assistant"]


class LmiChatChoice(TypedDict):
    index: Count
    message: LmiMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class LmiChatPart(TypedDict):
    index: Count
    delta: LmiMessagePart
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class LmiChatAnswer(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: Count
    choices: list[LmiChatChoice]
    usage: TokenUsage


class _LmiChatChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: Count
    choices: list[LmiChatPart]


class LmiChatChunk(_LmiChatChunk, total=False):
    usage: TokenUsage | None
