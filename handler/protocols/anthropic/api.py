"""The types of Anthropic's responses. They declare every field on the wire, for mypy and the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypedDict

from handler.core.errors import (
    InvalidParameter,
    ModelNotFound,
    NotKept,
    Overloaded,
    PromptTooLong,
    RefusedByEngine,
    ServingError,
)
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.schema import COUNT, TEXT, Count, NotRequired, Shape
from handler.protocols.openai.api import Page, read_limit

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded", "compaction"
]


class AnthropicThoughts(TypedDict):
    thinking_tokens: Count


class AnthropicIteration(TypedDict):
    """The token counts of one pass of the model: a summary, or the message."""

    type: Literal["compaction", "message"]
    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count


class AnthropicUsage(TypedDict):
    """Token counts, with `output_tokens_details` if reasoning is counted separately.

    The tokens of a summary before the message are counted only in `iterations`.
    """

    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count
    output_tokens_details: NotRequired[AnthropicThoughts]
    iterations: NotRequired[list[AnthropicIteration]]


class AppliedEdit(TypedDict):
    """An edit of the conversation, with what it removed."""

    type: Literal["clear_thinking_20251015", "clear_tool_uses_20250919"]
    cleared_input_tokens: Count
    cleared_thinking_turns: NotRequired[Count]
    cleared_tool_uses: NotRequired[Count]


class AnthropicContext(TypedDict):
    applied_edits: list[AppliedEdit]


class AnthropicOriginal(TypedDict):
    original_input_tokens: Count


class AnthropicCount(TypedDict):
    """The number of tokens after the edits of a request, which has `context_management` if it has edits."""

    input_tokens: Count
    context_management: NotRequired[AnthropicOriginal]


# -- blocks ------------------------------------------------------------------------------------------------------


class AnthropicText(TypedDict):
    type: Literal["text"]
    text: str


class AnthropicThinking(TypedDict):
    """A block of reasoning. The `signature` of a complete block is `SIGNATURE`, because the server signs nothing."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class AnthropicToolUse(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class AnthropicCompaction(TypedDict):
    """A summary of all messages before it, or null if the model wrote none. `signature` is sent for summaries that the
    client requested.
    """

    type: Literal["compaction"]
    content: str | None
    signature: NotRequired[str]


Block = AnthropicText | AnthropicThinking | AnthropicToolUse | AnthropicCompaction


class AnthropicMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage
    context_management: NotRequired[AnthropicContext]


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


class AnthropicCompactionDelta(TypedDict):
    type: Literal["compaction_delta"]
    content: str | None
    encrypted_content: None


BlockDelta = (
    AnthropicCompactionDelta
    | AnthropicTextDelta
    | AnthropicThinkingDelta
    | AnthropicSignatureDelta
    | AnthropicInputDelta
)


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
    context_management: NotRequired[AnthropicContext]


class AnthropicMessageStop(TypedDict):
    type: Literal["message_stop"]


class AnthropicPing(TypedDict):
    """An event that keeps a silent stream open."""

    type: Literal["ping"]


MessageEvent = AnthropicMessageStart | BlockEvent | AnthropicMessageDelta | AnthropicMessageStop | AnthropicPing


# -- Anthropic's errors, `{"type": "error", "error": {"type", "message"}}`, with its statuses --------------------------
# Source: Anthropic's API reference, "Errors".


class AnthropicErrorDetails(TypedDict):
    error_code: str
    unsupported: NotRequired[list[str]]


class AnthropicErrorDetail(TypedDict):
    """An error, with `details` if the client can use them to correct the request."""

    type: str
    message: str
    details: NotRequired[AnthropicErrorDetails]


class AnthropicError(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorDetail


class ThreadsUnsupported(InvalidParameter):
    """The request has a `thread`, but the server does not store conversations.

    When Anthropic's client receives these `details`, it sends the whole conversation without `thread`.
    """

    details: ClassVar[AnthropicErrorDetails] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


class ThreadNotFound(NotKept):
    """The message that `previous_message_id` refers to, or an earlier message of its thread, is not stored.

    When Anthropic's client receives these `details`, it sends the whole conversation in a new thread.
    """

    details: ClassVar[AnthropicErrorDetails] = {"error_code": "thread_not_found"}


class ToolUnresolved(InvalidParameter):
    """A `tool_addition` or `tool_removal` refers to a tool that neither `tools` nor an earlier block defines."""

    details: ClassVar[AnthropicErrorDetails] = {"error_code": "tool_reference_unresolved"}


class CompactionRefused(InvalidParameter):
    """A `compaction` block cannot be read, or the conversation cannot be summarized.

    Args:
        code: the code by which Anthropic's client chooses the class of its exception.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.details: AnthropicErrorDetails = {"error_code": f"compaction_{code}"}


class CompactionUnavailable(Overloaded):
    """The model wrote no summary. The client may retry."""

    details: ClassVar[AnthropicErrorDetails] = {"error_code": "compaction_unavailable"}


_DETAILED = (ThreadsUnsupported, ThreadNotFound, ToolUnresolved, CompactionRefused, CompactionUnavailable)

_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 529: "overloaded_error"}


class AnthropicErrors(ErrorFormat):
    """Anthropic's error format. Status 529 means that the client may retry soon."""

    statuses = MappingProxyType({ServingError: 500, Overloaded: 529})

    def body(self, error: ServingError) -> AnthropicError:
        """Return the body of an error response, which is also the data of an `error` event in a stream."""
        message = error.message
        if isinstance(error, PromptTooLong):  # clients recognize these messages: they shorten the conversation,
            message = f"prompt is too long: {error.length} tokens > {error.most} maximum"
        elif isinstance(error, RefusedByEngine) and error.tells_overflow:
            message = f"prompt is too long: {message}"
        elif isinstance(error, ModelNotFound):  # or ask for another model
            message = f"model: {error.name}{error.served}"
        status = self.status(error)
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        detail: AnthropicErrorDetail = {"type": kind, "message": message}
        if isinstance(error, _DETAILED):
            detail["details"] = error.details
        return {"type": "error", "error": detail}


ERRORS = AnthropicErrors()


# -- the list of models, for clients that send the header `anthropic-version` ------------------------------------------


VERSION_HEADER = "anthropic-version"
"""The header that identifies Anthropic's clients, which send it with every request."""

_MOST = 1000  # items on a page


def rfc3339(seconds: float) -> str:
    """Return a time, in whole seconds since 1970, as Anthropic writes times."""
    return datetime.fromtimestamp(int(seconds), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


PAGE: Mapping[str, Shape] = {"limit": COUNT, "after_id": TEXT, "before_id": TEXT}
"""The schemas of the query that `read_page` reads."""


def read_page(query: Mapping[str, str]) -> Page:
    """Read the query of a request for a list: `limit`, and `after_id` or `before_id`.

    Raises:
        InvalidParameter: a parameter is invalid. The message names it.
    """
    limit = read_limit(query, _MOST)
    if "before_id" in query:
        return Page(limit, query["before_id"], newest_first=False, is_reversed=True)
    return Page(limit, query.get("after_id", ""), newest_first=True)


def listed(items: Sequence[Any], *, has_more: bool) -> Any:
    """Return a page of a list, with the ids of its first and last item."""
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"data": [*items], "has_more": has_more, "first_id": first, "last_id": last}
