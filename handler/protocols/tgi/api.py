"""The types of TGI's and MindIE's responses. They declare every field on the wire, for mypy and OpenAPI."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Annotated, NamedTuple, TypedDict

from handler.core.errors import (
    AnswerTooLong,
    GenerationFailed,
    InternalError,
    InvalidParameter,
    InvalidPayload,
    NotJson,
    Overloaded,
    PromptTooLong,
    ServingError,
    TooLong,
    Unavailable,
)
from handler.core.framing import JSON, SSE
from handler.core.values import Request
from handler.protocols.kernel.errors import ErrorFormat, HttpResponse
from handler.protocols.kernel.schema import Count, NotRequired
from handler.protocols.kernel.tensors import TensorValues
from handler.protocols.lmi.api import FinishReason


class TgiPromptToken(TypedDict):
    id: int
    text: str
    logprob: float | None


class TgiToken(TgiPromptToken):
    special: bool


class _TgiDetails(TypedDict):
    finish_reason: FinishReason
    generated_tokens: Count
    seed: Count | None


class TgiOutput(_TgiDetails):
    """The details of one sequence."""

    prefill: list[TgiPromptToken]
    tokens: list[TgiToken]


class TgiTops(TypedDict, total=False):
    """The alternatives to each token, on request."""

    top_tokens: list[list[TgiToken]]


class TgiSequence(TgiOutput, TgiTops):
    """A sequence in `best_of_sequences`."""

    generated_text: str


class TgiOthers(TypedDict, total=False):
    best_of_sequences: list[TgiSequence]


class TgiDetails(TgiOutput, TgiTops, TgiOthers):
    """The details of a non-streaming response."""


class TgiCompatDetails(TgiDetails):
    """The details of a non-streaming response with TGI_COMPAT, to which LMI adds `inputs`."""

    inputs: str


class TgiStreamDetails(_TgiDetails):
    input_length: Count
    prefill: NotRequired[list[TgiPromptToken]]


class TgiInputs(TypedDict, total=False):
    """The prompt, present only if it is at most 64 KiB long as JSON."""

    inputs: str


class TgiCompatStreamDetails(TgiStreamDetails, TgiTops, TgiInputs):
    """The details in a stream with TGI_COMPAT, to which LMI adds `top_tokens` and `inputs`."""


class TgiAnswer(TypedDict):
    generated_text: str
    details: NotRequired[TgiDetails | TgiCompatDetails]
    outputs: NotRequired[TensorValues]


TgiList = Annotated[list[TgiAnswer], ("minItems", 1), ("maxItems", 1)]


class TgiBeside(TypedDict, total=False):
    """Additional fields of an event, on request."""

    top_tokens: list[TgiToken]
    outputs: TensorValues


class TgiEvent(TgiBeside):
    index: Annotated[int, ("minimum", 1)]
    token: TgiToken
    generated_text: str | None
    details: TgiStreamDetails | TgiCompatStreamDetails | None


# -- other routes ------------------------------------------------------------------------------------------------


class TgiInfo(TypedDict):
    model_id: str
    model_sha: str | None
    model_pipeline_tag: str
    max_concurrent_requests: Count
    max_best_of: Count
    max_stop_sequences: Count
    max_input_tokens: Count | None
    max_total_tokens: Count | None
    validation_workers: Count
    max_client_batch_size: Count
    router: str
    version: str
    sha: str | None
    docker_label: str | None
    default_sampling_params: dict[str, float]


class TgiPiece(TypedDict):
    """A token with its byte range in the prompt: from `start` up to but excluding `stop`."""

    id: Count
    text: str
    start: Count
    stop: Count


class TgiChatPieces(TypedDict):
    tokenize_response: list[TgiPiece]
    templated_text: str


# -- MindIE ------------------------------------------------------------------------------------------------------


class MindieToken(TypedDict):
    id: int
    logprob: None
    special: None
    text: str


class MindieDetails(_TgiDetails):
    prompt_tokens: Count
    prefill: NotRequired[list[MindieToken]]
    tokens: NotRequired[list[MindieToken]]


class MindieAnswer(TypedDict):
    generated_text: str
    details: NotRequired[MindieDetails]


class MindieEvent(TypedDict):
    token: MindieToken
    generated_text: str | None
    details: MindieDetails | None


# -- TGI's errors, with its statuses, messages and `error_type` (text-generation-inference 3, router/src/server.rs) ----


class TgiError(TypedDict):
    """The body of an error. `code` is present only with TGI_COMPAT."""

    error: str
    error_type: str
    code: NotRequired[Count]


class MindieError(TypedDict):
    error: str


SLICE = 1024
"""The maximum number of new tokens for which TGI 3 requires room in the context. If more fit, TGI generates more."""


class WrongType(InvalidPayload):
    """A field has the wrong JSON type or is missing. For a wrong type, the message begins with the field path."""

    @property
    def public(self) -> str:
        where, _, wrong_type = self.message.partition(": ")
        return f"{where} has a wrong type" if wrong_type else where


class OutOfRange(InvalidParameter):
    """A value is out of range or not supported. If it is out of range, the message is the same as in TGI or MindIE."""

    @property
    def public(self) -> str:
        return self.message.partition(": ")[0].removesuffix(". Given")


UNHEALTHY: TgiError = {"error": "unhealthy", "error_type": "healthcheck"}
"""The body of a failed health check."""


class Failure(NamedTuple):
    """An error as TGI renders it.

    Attributes:
        in_stream: whether a request for a stream gets the error as an event with status 200. It is False if TGI detects
            the error before it reads whether the client requests a stream.
    """

    status: int
    error: str
    error_type: str
    in_stream: bool = True


class TgiErrors(ErrorFormat):
    """TGI's errors.

    Args:
        streams: whether the request is for a stream.
        request: the parsed request, or None if it is not parsed yet.
        has_begun: returns whether a non-streaming response already contains tokens.
    """

    statuses = MappingProxyType(
        {NotJson: 400, InvalidPayload: 422, InvalidParameter: 422, TooLong: 422, Overloaded: 429}
    )

    def __init__(
        self, *, streams: bool = False, request: Request | None = None, has_begun: Callable[[], bool] = lambda: False
    ) -> None:
        self._streams = streams
        self._request = request
        self._has_begun = has_begun

    def body(self, error: ServingError) -> TgiError | MindieError:
        return self._value(self._failure(error))

    def tail(self, error: ServingError) -> TgiError | MindieError:
        return self._value(self._failure(error, begun=True))

    def response(self, error: ServingError) -> HttpResponse:
        failure = self._failure(error, begun=self._has_begun())
        value = self._value(failure)
        if self._streams and failure.in_stream:
            return HttpResponse(200, SSE.content_type, SSE.encode(value))
        return HttpResponse(failure.status, JSON.content_type, JSON.encode(value))

    def _value(self, failure: Failure) -> TgiError | MindieError:
        return {"error": failure.error, "error_type": failure.error_type}

    def _failure(self, error: ServingError, *, begun: bool = False) -> Failure:
        """Return the error as TGI renders it. If TGI renders it as plain text, `error` is that text."""
        status = self.status(error)
        match error:
            case NotJson():
                return Failure(
                    status, f"Failed to parse the request body as JSON: {error.message}", "validation", False
                )
            case WrongType():
                prefix = "Failed to deserialize the JSON body into the target type"
                return Failure(status, f"{prefix}: {error.message}", "validation", False)
            case PromptTooLong() | AnswerTooLong():
                return Failure(status, f"Input validation error: {_too_long(error, self._request)}", "validation")
            case InvalidPayload() | InvalidParameter():
                return Failure(status, f"Input validation error: {error.message}", "validation")
            case Overloaded():
                return Failure(status, "Model is overloaded", "overloaded")
            case Unavailable() if begun:  # the server is stopping
                return Failure(500, "Incomplete generation", "incomplete_generation")
            case Unavailable():
                return Failure(status, error.message, "healthcheck", False)
            case InternalError():
                return Failure(status, error.message, "incomplete_generation")
            case GenerationFailed():
                return Failure(status, f"Request failed during generation: {error.message}", "generation")
        return Failure(status, error.message, error.kind, False)


class MindieErrors(TgiErrors):
    """MindIE's errors, whose bodies have only a message."""

    def _value(self, failure: Failure) -> MindieError:
        return {"error": failure.error}


def _too_long(error: PromptTooLong | AnswerTooLong, request: Request | None) -> str:
    """Return TGI's message for a prompt or a response that is too long.

    TGI first checks the sum of prompt tokens and new tokens. Without a limit on new tokens, it checks only the prompt.
    """
    most = error.most
    if isinstance(error, PromptTooLong):
        most += 1
        num_new = 0 if request is None or request.fill_context else request.num_needed
        if error.num_prompt + num_new <= most:
            return f"`inputs` must have less than {error.most} tokens. Given: {error.length}"
    else:
        num_new = error.num_new
    num_prompt = error.length if isinstance(error, PromptTooLong) else error.num_prompt
    sizes = f"Given: {num_prompt} `inputs` tokens and {num_new} `max_new_tokens`"
    return f"`inputs` tokens + `max_new_tokens` must be <= {most}. {sizes}"
