"""The types of OpenAI's answers. Each field of the wire is declared here, for mypy and for the API's document."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

from handler.core.errors import (
    InvalidParameter,
    InvalidPayload,
    ModelNotFound,
    NotKept,
    Overloaded,
    ServingError,
    TooLong,
    Unauthorized,
)
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.readers import Named
from handler.protocols.kernel.schema import Count, NotRequired

FinishReason = Annotated[str, ("enum", ("stop", "length", "tool_calls", "content_filter", "function_call"))]


class CompletionDetails(TypedDict):
    reasoning_tokens: Count


class PromptDetails(TypedDict):
    cached_tokens: Count


class TokenUsage(TypedDict):
    """Token counts; with details of the answer if reasoning is separated from the text, and of the prompt if part of
    it was cached.
    """

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    completion_tokens_details: NotRequired[CompletionDetails]
    prompt_tokens_details: NotRequired[PromptDetails]


class OpenAiAnswer(TypedDict):
    """The fields of every answer and chunk except `object` and `choices`."""

    id: str
    created: Count
    model: str
    system_fingerprint: str


class AnswerHead(OpenAiAnswer):
    object: Any


class StreamUsage(TypedDict, total=False):
    """Token counts, on request; null in earlier chunks."""

    usage: TokenUsage | None


# -- chat --------------------------------------------------------------------------------------------------------


class TokenLogprob(TypedDict):
    token: str
    logprob: float | None
    bytes: list[Count] | None


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat; in OpenAI's dialect with `refusal`."""

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
    """A piece of a call in a stream; the first of a call has `id`, `type` and the function's name."""

    index: Count
    function: FunctionCallPart
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]


class MessageParts(TypedDict, total=False):
    """Parts of a message besides its text."""

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


class OpenAiChatChoice(TypedDict):
    index: Count
    message: OpenAiMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class OpenAiChatPart(TypedDict):
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
    """Columns with an item for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None
    text_offset: list[Count]


class TokenIds(TypedDict):
    """The ids of an answer's tokens, on request."""

    token_ids: NotRequired[list[Count]]


class OpenAiTextChoice(TokenIds):
    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None


class _OpenAiTextChunk(OpenAiAnswer):
    object: Literal["text_completion"]
    choices: list[OpenAiTextChoice]


class OpenAiTextChunk(_OpenAiTextChunk, StreamUsage):
    """A chunk of a text completion's stream."""


class OpenAiTextAnswer(_OpenAiTextChunk):
    usage: TokenUsage


# -- embeddings --------------------------------------------------------------------------------------------------


class PromptUsage(TypedDict):
    prompt_tokens: Count
    total_tokens: Count


class Embedding(TypedDict):
    """A text's vector; base64 encodes little-endian numbers of 32 bits."""

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
    """`avg_logprob` is null if the engine has no log-probabilities; no engine reports `no_speech_prob`."""

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
    """An event of a transcript's stream."""

    type: Literal["transcript.text.delta"]
    delta: str


class TranscriptDone(TypedDict):
    """The last event of a transcript's stream."""

    type: Literal["transcript.text.done"]
    text: str
    usage: TranscriptionUsage


# -- models ------------------------------------------------------------------------------------------------------


class OpenAiModel(TypedDict):
    """The model or an adapter.

    `root` is the last part of the model's path or address, `parent` an adapter's base model, and `input_modalities`
    what messages may have.
    """

    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    root: str
    parent: str | None
    max_model_len: Count | None
    input_modalities: list[str]


class OpenAiModels(TypedDict):
    object: Literal["list"]
    data: list[OpenAiModel]


# -- lists that come in pages ------------------------------------------------------------------------------------


class Listing(TypedDict):
    """A page of a list's `data`; `first_id` and `last_id` are those of the page, "" where it is empty."""

    object: Literal["list"]
    first_id: str
    last_id: str
    has_more: bool


class Page(NamedTuple):
    """The query of a request for a list. Only lists of files read `purpose`; "" means all."""

    limit: int
    after: str
    newest_first: bool
    purpose: str = ""


def read_page(query: Mapping[str, str], most: int = 100, default: int = 20) -> Page:
    """Read a list's query: `limit`, `after`, `order` and `purpose`.

    Raises:
        InvalidParameter: naming the field.
    """
    limit, order = query.get("limit", str(default)), query.get("order", "desc")
    if not (re.fullmatch(r"[0-9]{1,6}", limit) and 1 <= int(limit) <= most):
        raise Named("limit", limit).refused(f"must be an integer from 1 to {most}")
    if order not in ("asc", "desc"):
        raise Named("order", order).refused("must be asc or desc")
    return Page(int(limit), query.get("after", ""), order == "desc", query.get("purpose", ""))


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
    """Why a batch has failed; `line` is that of its input."""

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
    """A batch. A time is null until the batch has come so far, and so are the ids of files that it has written."""

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


# -- errors, `{"error": {"message", "type", "param", "code"}}`, and the statuses that clients know ---------------------


class OpenAiErrorFields(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAiError(TypedDict):
    error: OpenAiErrorFields


_INVALID = "invalid_request_error"

_NAME = re.compile(r"'([\w.\[\]]+)'|([\w.\[\]]+)[=:]|((?:messages|tools)\[\d+\][\w.\[\]]*)")
"""The field at the start of a message: 'NAME', NAME=VALUE, NAME: or messages[0].content."""


def field_of(message: str) -> str | None:
    """Return the field that a message starts with."""
    match = _NAME.match(message)
    return next(filter(None, match.groups())) if match else None


class OpenAiErrors(ErrorFormat):
    """OpenAI's form of errors; its clients choose their exception by the status."""

    statuses = MappingProxyType({ServingError: 500, Overloaded: 429})

    def body(self, error: ServingError) -> OpenAiError:
        number = self.status(error)
        param, code = None, None
        if isinstance(error, InvalidPayload | InvalidParameter | TooLong):
            param = field_of(error.message)
        if isinstance(error, TooLong):
            code = "context_length_exceeded"
        elif isinstance(error, ModelNotFound):
            param, code = "model", "model_not_found"
        elif isinstance(error, NotKept):
            param = error.param or None
            code = "previous_response_not_found" if param == "previous_response_id" else None
        elif isinstance(error, Unauthorized):
            code = "invalid_api_key"
        elif number == 429:
            code = "rate_limit_exceeded"
        kind = _INVALID if number < 500 and number != 429 else "rate_limit_error" if number == 429 else "server_error"
        return {"error": {"message": error.message, "type": kind, "param": param, "code": code}}


ERRORS = OpenAiErrors()
