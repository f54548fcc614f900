"""The types of OpenAI's responses. They declare every field on the wire, for mypy and the OpenAPI document."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

from handler.core.errors import (
    ConversationLocked,
    InvalidParameter,
    InvalidPayload,
    ModelNotFound,
    NotKept,
    Overloaded,
    RefusedByEngine,
    ServingError,
    TooLong,
    Unauthorized,
)
from handler.protocols.api import Models
from handler.protocols.kernel.errors import ErrorFormat, Headers, delay_headers
from handler.protocols.kernel.readers import NamedValue, digits
from handler.protocols.kernel.schema import Count, NotRequired

FinishReason = Annotated[str, ("enum", ("stop", "length", "tool_calls", "content_filter", "function_call"))]


class CompletionDetails(TypedDict):
    reasoning_tokens: Count


class PromptDetails(TypedDict):
    cached_tokens: Count


class TokenUsage(TypedDict):
    """Token counts.

    `completion_tokens_details` is present if reasoning is separated from the text. `prompt_tokens_details` is present
    if a part of the prompt was cached.
    """

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    completion_tokens_details: NotRequired[CompletionDetails]
    prompt_tokens_details: NotRequired[PromptDetails]


class OpenAiAnswer(TypedDict):
    """The fields of every response and chunk except `object` and `choices`."""

    id: str
    created: Count
    model: str
    system_fingerprint: str


class ResponseFields(OpenAiAnswer):
    object: Any


class StreamUsage(TypedDict, total=False):
    """The token counts of a stream, on request. They may be null in all chunks except the last."""

    usage: TokenUsage | None


# -- chat --------------------------------------------------------------------------------------------------------


class TokenLogprob(TypedDict):
    token: str
    logprob: float | None
    bytes: list[Count] | None


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """The log-probabilities of a chat response. Only OpenAI's dialect has `refusal`."""

    content: list[ChosenLogprob]
    refusal: NotRequired[None]


class FunctionCall(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionCallPart(TypedDict, total=False):
    name: str
    arguments: str


class ToolCallPart(TypedDict):
    """A part of a streamed tool call. The first part has `id`, `type` and the function name."""

    index: Count
    function: FunctionCallPart
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]


class MessageParts(TypedDict, total=False):
    """The parts of a message other than its text."""

    reasoning: str
    reasoning_content: str
    tool_calls: list[ToolCall]


class OpenAiMessage(MessageParts):
    role: Literal["assistant"]
    content: str | None
    refusal: None


class OpenAiMessagePart(TypedDict, total=False):
    role: Literal["assistant"]
    content: str | None
    reasoning: str
    reasoning_content: str
    tool_calls: list[ToolCallPart] | None


class StopReason(TypedDict):
    """vLLM's `stop_reason` field: the stop string or the id of the stop token that ended the response."""

    stop_reason: NotRequired[str | int | None]


class OpenAiChatChoice(StopReason):
    index: Count
    message: OpenAiMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class OpenAiChatPart(StopReason):
    index: Count
    delta: OpenAiMessagePart
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class OpenAiChatAnswer(OpenAiAnswer):
    object: Literal["chat.completion"]
    choices: list[OpenAiChatChoice]
    usage: TokenUsage


class OpenAiChatChunk(OpenAiAnswer, StreamUsage):
    object: Literal["chat.completion.chunk"]
    choices: list[OpenAiChatPart]


# -- text completions --------------------------------------------------------------------------------------------


class TextLogprobs(TypedDict):
    """The log-probabilities of a text completion, as lists with one item per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None
    text_offset: list[Count]


class TokenIds(TypedDict):
    """The ids of the response tokens, on request."""

    token_ids: NotRequired[list[Count]]


class OpenAiTextChoice(TokenIds, StopReason):
    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None


class _OpenAiTextChunk(OpenAiAnswer):
    object: Literal["text_completion"]
    choices: list[OpenAiTextChoice]


class OpenAiTextChunk(_OpenAiTextChunk, StreamUsage):
    """A chunk of a streamed text completion."""


class OpenAiTextAnswer(_OpenAiTextChunk):
    usage: TokenUsage


# -- embeddings --------------------------------------------------------------------------------------------------


class PromptUsage(TypedDict):
    prompt_tokens: Count
    total_tokens: Count


class Embedding(TypedDict):
    """The embedding of a text, as a list or as base64 of little-endian 32-bit floats."""

    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str


class EmbeddingAnswer(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PromptUsage


# -- audio -------------------------------------------------------------------------------------------------------


class TranscriptionUsage(TypedDict):
    type: Literal["tokens"]
    input_tokens: Count
    output_tokens: Count
    total_tokens: Count


class Transcription(TypedDict):
    text: str
    usage: TranscriptionUsage


class TranscriptionSegment(TypedDict):
    """A segment of a transcript. `avg_logprob` is null if the engine reports no log-probabilities."""

    id: Count
    seek: Count
    start: float
    end: float
    text: str
    tokens: list[Count]
    temperature: float
    avg_logprob: float | None
    compression_ratio: float
    no_speech_prob: None


class TranscriptionDuration(TypedDict):
    type: Literal["duration"]
    seconds: Count


class VerboseTranscription(TypedDict):
    task: str
    language: str
    duration: float
    text: str
    segments: list[TranscriptionSegment]
    usage: TranscriptionDuration


class TranscriptDelta(TypedDict):
    """An event of a streamed transcript, with the next part of the text."""

    type: Literal["transcript.text.delta"]
    delta: str


class TranscriptDone(TypedDict):
    """The last event of a streamed transcript, with the whole text."""

    type: Literal["transcript.text.done"]
    text: str
    usage: TranscriptionUsage


# -- models ------------------------------------------------------------------------------------------------------


class OpenAiModel(TypedDict):
    """The model or an adapter.

    `root` is the last part of the model path or URI, `parent` is the base model of an adapter, `input_modalities` lists
    what requests may contain, and `supported_parameters` lists the sampling parameters that the engine supports.
    """

    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    root: str
    parent: str | None
    max_model_len: Count | None
    input_modalities: list[str]
    supported_parameters: list[str]


class TypeSafeModel(TypedDict):
    """A model as TypeSafe's SDK lists it. The date is that of `created`."""

    name: str
    description: str
    release_date: str


class OpenAiModels(TypedDict):
    """OpenAI's list in `data`, and the list of TypeSafe's SDK in `models`."""

    object: Literal["list"]
    data: list[OpenAiModel]
    models: list[TypeSafeModel]


class ServedModels(Models):
    """The response of /models: DJL Serving's list, and that of OpenAI's clients with a base URL without /v1."""

    object: Literal["list"]
    data: list[OpenAiModel]


def listed_models(models: list[OpenAiModel]) -> OpenAiModels:
    """Return the list of models for the SDKs of OpenAI and TypeSafe."""
    return {"object": "list", "data": models, "models": [_of_typesafe(model) for model in models]}


def _of_typesafe(model: OpenAiModel) -> TypeSafeModel:
    kind = f"adapter of {model['parent']}" if model["parent"] else "model"
    return {
        "name": model["id"],
        "description": f"The {kind} {model['root']}",
        "release_date": time.strftime("%Y-%m-%d", time.gmtime(model["created"])),
    }


# -- pages of lists ----------------------------------------------------------------------------------------------------


class Listing(TypedDict):
    """A page of a list. `first_id` and `last_id` are the ids of its first and last item, or "" if the page is empty."""

    object: Literal["list"]
    first_id: str
    last_id: str
    has_more: bool


class Page(NamedTuple):
    """The query of a request for a page of a list.

    Attributes:
        after: the id of the item after which the list is read, or "" for its beginning.
        purpose: the purpose of the files in a list of files, or "" for all purposes.
        is_reversed: whether the items are sent in the opposite order, because the page ends before the item `after`.
    """

    limit: int
    after: str
    newest_first: bool
    purpose: str = ""
    is_reversed: bool = False


def read_limit(query: Mapping[str, str], most: int, default: int = 20) -> int:
    """Read the maximum number of items on a page.

    Raises:
        InvalidParameter: `limit` is invalid.
    """
    return NamedValue("limit", query.get("limit", str(default))).read(digits(1, most))


def read_page(query: Mapping[str, str], most: int = 100, default: int = 20) -> Page:
    """Read the query of a request for a list: `limit`, `after`, `order` and `purpose`.

    Raises:
        InvalidParameter: a parameter is invalid. The message names it.
    """
    limit, order = read_limit(query, most, default), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise NamedValue("order", order).refused("must be asc or desc")
    return Page(limit, query.get("after", ""), order == "desc", query.get("purpose", ""))


def listed(items: Sequence[Any], *, has_more: bool) -> dict[str, Any]:
    first, last = (items[0]["id"], items[-1]["id"]) if items else ("", "")
    return {"object": "list", "data": [*items], "first_id": first, "last_id": last, "has_more": has_more}


# -- files and batches -------------------------------------------------------------------------------------------


class OpenAiFile(TypedDict):
    id: str
    object: Literal["file"]
    bytes: Count
    created_at: Count
    expires_at: Count
    filename: str
    purpose: Annotated[str, ("enum", ("batch", "batch_output"))]
    status: Literal["processed"]


class OpenAiFiles(Listing):
    data: list[OpenAiFile]


class DeletedFile(TypedDict):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchError(TypedDict):
    """The reason why a batch failed. `line` is the number of the invalid line in the batch input."""

    code: str
    message: str
    param: str | None
    line: Count | None


class BatchErrors(TypedDict):
    object: Literal["list"]
    data: list[BatchError]


class BatchCounts(TypedDict):
    total: Count
    completed: Count
    failed: Count


_STATUSES = (
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled",
)  # fmt: skip


class OpenAiBatch(TypedDict):
    """A batch. Times of events are null until the events happen. Ids of output files are null until the files exist."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Annotated[str, ("enum", _STATUSES)]
    output_file_id: str | None
    error_file_id: str | None
    created_at: Count
    in_progress_at: Count | None
    expires_at: Count
    finalizing_at: Count | None
    completed_at: Count | None
    failed_at: Count | None
    expired_at: Count | None
    cancelling_at: Count | None
    cancelled_at: Count | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None


class OpenAiBatches(Listing):
    data: list[OpenAiBatch]


# -- errors, `{"error": {"message", "type", "param", "code"}}`, with OpenAI's statuses ---------------------------------


class OpenAiErrorFields(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAiError(TypedDict):
    error: OpenAiErrorFields


_INVALID = "invalid_request_error"

_NAME = re.compile(r"'([\w.\[\]]+)'|([\w.\[\]]+)[=:]|((?:messages|tools)\[[0-9]+\][\w.\[\]]*)")
"""Matches the field at the start of an error message: 'NAME', NAME=VALUE, NAME: or messages[0].content."""


def field_of(error: ServingError) -> str | None:
    """Return the field at the start of a message about an invalid request, or None if the message starts with none."""
    match = _NAME.match(error.message) if isinstance(error, InvalidPayload | InvalidParameter | TooLong) else None
    return next(filter(None, match.groups())) if match else None


class OpenAiErrors(ErrorFormat):
    """OpenAI's error format. OpenAI clients choose the exception to raise based on the status."""

    statuses = MappingProxyType({ServingError: 500, Overloaded: 429})

    def headers(self, error: ServingError) -> Headers:
        """Return when to retry if the conversation is locked. Without it, OpenAI's clients would retry too soon."""
        return delay_headers() if isinstance(error, ConversationLocked) else ()

    def body(self, error: ServingError) -> OpenAiError:
        number, message = self.status(error), error.message
        param, code = field_of(error), None
        if isinstance(error, TooLong) or (isinstance(error, RefusedByEngine) and error.tells_overflow):
            code = "context_length_exceeded"
        elif isinstance(error, ModelNotFound):
            param, code = "model", "model_not_found"
        elif isinstance(error, NotKept):
            param = error.param or None
            code = "previous_response_not_found" if param == "previous_response_id" else None
        elif isinstance(error, ConversationLocked):
            code = "conversation_locked"
        elif isinstance(error, Unauthorized):
            code, message = "invalid_api_key", f"Incorrect API key provided, or none: {message}"
        elif number == 429:
            code = "rate_limit_exceeded"
        return {"error": {"message": message, "type": _error_type(number), "param": param, "code": code}}


def _error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return _INVALID if status < 500 else "server_error"


ERRORS = OpenAiErrors()
