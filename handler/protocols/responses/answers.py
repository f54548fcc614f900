"""The types of OpenAI's responses. Each field of the wire is declared here, for the API's document."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from handler.protocols.kernel.json_schema import Count, NotRequired

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponseItem(TypedDict):
    """A message, a thought or a call."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Status
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[dict[str, Any]]]
    summary: NotRequired[list[dict[str, Any]]]
    arguments: NotRequired[str]
    call_id: NotRequired[str]
    name: NotRequired[str]
    namespace: NotRequired[str]


class ResponseUsage(TypedDict):
    input_tokens: Count
    input_tokens_details: dict[str, Any]
    output_tokens: Count
    output_tokens_details: dict[str, Any]
    total_tokens: Count


class OpenAiResponse(TypedDict):
    id: str
    object: Literal["response"]
    created_at: Count
    model: str
    instructions: str | None
    max_output_tokens: Count | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    status: Status
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    output: list[ResponseItem]
    usage: ResponseUsage | None


class OpenAiResponseEvent(TypedDict):
    """An event; `type` says which of the other fields it has."""

    type: str
    sequence_number: Count
    response: NotRequired[OpenAiResponse]
    item: NotRequired[ResponseItem]
    part: NotRequired[dict[str, Any]]
    item_id: NotRequired[str]
    output_index: NotRequired[Count]
    content_index: NotRequired[Count]
    delta: NotRequired[str]
    text: NotRequired[str]
    arguments: NotRequired[str]
    name: NotRequired[str]
    logprobs: NotRequired[list[dict[str, Any]]]
