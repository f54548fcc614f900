"""The types of LMI's answers. Each field of the wire is declared here, for mypy and for the API's document."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from handler.protocols.kernel.schema.types import Count, NotRequired
from handler.protocols.openai.answers import ChatLogprobs, MessageParts, StreamUsage, TokenUsage, ToolCallPart
from handler.protocols.tensors.outputs import TensorValues

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
    """The last line of a stream has no `tokens`."""

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
    """`prefill` has the prompt's tokens but the first, on request; `seed` is the request's."""

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
