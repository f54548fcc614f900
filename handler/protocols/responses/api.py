"""The types of OpenAI's Responses API, and the query parameters of the routes for stored responses.

The types declare every field on the wire, for mypy and the OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from handler.core.errors import InvalidPayload, NotKept
from handler.core.numbers import is_digits
from handler.protocols.kernel.readers import NamedValue
from handler.protocols.kernel.schema import Count, NotRequired
from handler.protocols.openai.api import Listing

Status = Literal["in_progress", "completed", "incomplete", "failed"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

# -- items -------------------------------------------------------------------------------------------------------


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


Part = OutputText | ReasoningText


class _Item(TypedDict):
    id: str
    status: Status


class MessageItem(_Item):
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningText]


class CallItem(_Item):
    type: Literal["function_call"]
    arguments: str
    call_id: str
    name: str
    namespace: NotRequired[str]


class CustomCallItem(_Item):
    type: Literal["custom_tool_call"]
    input: str
    call_id: str
    name: str
    namespace: NotRequired[str]


ResponseItem = MessageItem | ReasoningItem | CallItem | CustomCallItem


class CompactionItem(TypedDict):
    """A summary, which replaces the items before it in later requests."""

    id: str
    type: Literal["compaction"]
    encrypted_content: str


OutputItem = ResponseItem | CompactionItem

# -- a response --------------------------------------------------------------------------------------------------


class InputTokens(TypedDict):
    cached_tokens: Count
    cache_write_tokens: Count


class OutputTokens(TypedDict):
    reasoning_tokens: Count


class ResponseUsage(TypedDict):
    input_tokens: Count
    input_tokens_details: InputTokens
    output_tokens: Count
    output_tokens_details: OutputTokens
    total_tokens: Count


class ResponseReasoning(TypedDict):
    effort: str | None
    summary: None


class ResponseText(TypedDict):
    format: dict[str, Any]


class ConversationName(TypedDict):
    """The conversation of a response."""

    id: str


class ResponseHead(TypedDict):
    """The fields of the request that a response repeats."""

    background: bool
    conversation: NotRequired[ConversationName]
    frequency_penalty: float
    instructions: str | None
    max_output_tokens: Count | None
    max_tool_calls: Count | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: Literal[0]
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class ResponseStart(ResponseHead):
    """The fields of a response that do not change."""

    id: str
    object: Literal["response"]
    created_at: Count
    model: str


class ResponseFailure(TypedDict):
    code: Literal["rate_limit_exceeded", "server_error"]
    message: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class OpenAiResponse(ResponseStart):
    status: ResponseStatus
    completed_at: Count | None
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None


class CompactedResponse(TypedDict):
    """The items of the next request: the user's messages, and the summary of all items."""

    id: str
    object: Literal["response.compaction"]
    created_at: Count
    output: list[dict[str, Any] | OutputItem]
    usage: ResponseUsage | None


# -- events ------------------------------------------------------------------------------------------------------


class _Event(TypedDict):
    sequence_number: Count


ResponseState = Literal[
    "response.created",
    "response.queued",
    "response.in_progress",
    "response.completed",
    "response.incomplete",
    "response.failed",
]


class ResponseEvent(_Event):
    type: ResponseState
    response: OpenAiResponse


ItemState = Literal["response.output_item.added", "response.output_item.done"]
PartState = Literal["response.content_part.added", "response.content_part.done"]


class ItemEvent(_Event):
    type: ItemState
    output_index: Count
    item: OutputItem


class CallPlace(_Event):
    item_id: str
    output_index: Count


class CompactingEvent(CallPlace):
    """The model is writing a summary."""

    type: Literal["response.compaction.compacting"]


class TextPlace(CallPlace):
    content_index: Count


class PartEvent(TextPlace):
    type: PartState
    part: Part


class TextDelta(TextPlace):
    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[Any]


class TextDone(TextPlace):
    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[Any]


class ReasoningDelta(TextPlace):
    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningDone(TextPlace):
    type: Literal["response.reasoning_text.done"]
    text: str


class CallDelta(CallPlace):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class CallDone(CallPlace):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class CustomCallDelta(CallPlace):
    type: Literal["response.custom_tool_call_input.delta"]
    delta: str


class CustomCallDone(CallPlace):
    type: Literal["response.custom_tool_call_input.done"]
    input: str


Delta = TextDelta | ReasoningDelta | CallDelta | CustomCallDelta
Done = TextDone | ReasoningDone | CallDone | CustomCallDone
OpenAiResponseEvent = ResponseEvent | ItemEvent | PartEvent | CompactingEvent | Delta | Done

# -- stored responses --------------------------------------------------------------------------------------------


class ResponseTokens(TypedDict):
    """The number of tokens in the prompt of a request."""

    object: Literal["response.input_tokens"]
    input_tokens: Count


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseItems(Listing):
    """A page of the input items of a response."""

    data: list[dict[str, Any]]


# -- the routes of stored responses ------------------------------------------------------------------------------------


_MAX_DIGITS = 18  # digits of an event's number


def not_kept(id: str) -> NotKept:
    """Return the error for a response that is not stored for the client."""
    return NotKept(f"Response with id '{id[:128]}' not found.")


def read_starting_after(query: Mapping[str, str]) -> int | None:
    """Return the number of the last event that a client has read, or None if the query does not request events.

    Without a number, it is -1.

    Raises:
        InvalidParameter: the query is invalid.
    """
    streams = NamedValue("stream", query.get("stream", "")).read(_flag)
    after = NamedValue("starting_after", query.get("starting_after", ""))
    if not streams:
        if after.value:
            raise after.refused("needs stream=true")
        return None
    return after.read(_event_number) if after.value else -1


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "1", "false", "0", ""):
        raise ValueError("must be true or false")
    return text.lower() in ("true", "1")


def _event_number(text: str) -> int:
    if not is_digits(text) or len(text) > _MAX_DIGITS:
        raise ValueError("must be the sequence number of an event")
    return int(text)


def deleted(id: str) -> DeletedResponse:
    return {"id": id, "object": "response", "deleted": True}


# -- conversations -----------------------------------------------------------------------------------------------------


class Conversation(TypedDict):
    id: str
    object: Literal["conversation"]
    created_at: Count
    metadata: dict[str, str]


class DeletedConversation(TypedDict):
    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]


class ConversationItems(Listing):
    """A page of the items of a conversation."""

    data: list[dict[str, Any]]


def no_conversation(id: str, param: str = "") -> NotKept:
    """Return the error for a conversation that is not stored for the client.

    Args:
        param: request field with the id, or "" if the id is in the path.
    """
    return NotKept(f"Conversation with id '{id[:128]}' not found.", param)


def no_conversation_item(id: str, item_id: str) -> NotKept:
    return NotKept(f"Item with id '{item_id[:128]}' not found in conversation '{id[:128]}'.")


def duplicate_item(id: str) -> InvalidPayload:
    """Return the error for an item with the id of another item in the conversation."""
    return InvalidPayload(
        f"Duplicate item found with id {id[:128]}. Remove duplicate items from your input and try again."
    )
