"""The types of Anthropic's answers. Each field of the wire is declared here, for mypy and for the API's document."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from handler.protocols.kernel.schema.types import Count, NotRequired

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class AnthropicThoughts(TypedDict):
    thinking_tokens: Count


class AnthropicUsage(TypedDict):
    """`output_tokens_details` where thoughts are told apart."""

    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count
    output_tokens_details: NotRequired[AnthropicThoughts]


class AnthropicCount(TypedDict):
    input_tokens: Count


class AnthropicModel(TypedDict):
    """The model or an adapter."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: Count | None


class AnthropicModels(TypedDict):
    """A page of them; `first_id` and `last_id` name the page's, and a client asks for the next one after `last_id`."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


# -- blocks ------------------------------------------------------------------------------------------------------


class AnthropicText(TypedDict):
    type: Literal["text"]
    text: str


class AnthropicThinking(TypedDict):
    """`signature` is always `SIGNATURE`: nothing is signed here."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class AnthropicToolUse(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Block = AnthropicText | AnthropicThinking | AnthropicToolUse


class AnthropicMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage


# -- events ------------------------------------------------------------------------------------------------------


class AnthropicMessageStart(TypedDict):
    type: Literal["message_start"]
    message: AnthropicMessage


class AnthropicBlockStart(TypedDict):
    type: Literal["content_block_start"]
    index: Count
    content_block: Block


class AnthropicTextDelta(TypedDict):
    type: Literal["text_delta"]
    text: str


class AnthropicThinkingDelta(TypedDict):
    type: Literal["thinking_delta"]
    thinking: str


class AnthropicSignatureDelta(TypedDict):
    type: Literal["signature_delta"]
    signature: str


class AnthropicInputDelta(TypedDict):
    type: Literal["input_json_delta"]
    partial_json: str


BlockDelta = AnthropicTextDelta | AnthropicThinkingDelta | AnthropicSignatureDelta | AnthropicInputDelta


class AnthropicBlockDelta(TypedDict):
    type: Literal["content_block_delta"]
    index: Count
    delta: BlockDelta


class AnthropicBlockStop(TypedDict):
    type: Literal["content_block_stop"]
    index: Count


BlockEvent = AnthropicBlockStart | AnthropicBlockDelta | AnthropicBlockStop


class AnthropicStop(TypedDict):
    stop_reason: StopReason
    stop_sequence: str | None


class AnthropicMessageDelta(TypedDict):
    type: Literal["message_delta"]
    delta: AnthropicStop
    usage: AnthropicUsage


class AnthropicMessageStop(TypedDict):
    type: Literal["message_stop"]


class AnthropicPing(TypedDict):
    """Sent in long silences."""

    type: Literal["ping"]


Event = AnthropicMessageStart | BlockEvent | AnthropicMessageDelta | AnthropicMessageStop | AnthropicPing
