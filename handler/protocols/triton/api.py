"""The types of Triton's answers. Each field of the wire is declared here, for the API's document too."""

from __future__ import annotations

from types import MappingProxyType
from typing import TypedDict

from handler.core.errors import (
    GenerationFailed,
    InvalidPayload,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    NotJson,
    ServingError,
    TooLarge,
    UnsupportedMedia,
)
from handler.core.framing import SSE
from handler.protocols.kernel.errors import ErrorFormat, HttpResponse
from handler.protocols.kernel.schema import Count, NotRequired

Numbers = float | list[float | None]
"""A tensor of one element is that element; others are flat lists."""

Texts = str | None | list[str | None]
Counts = Count | list[Count]


class TritonHead(TypedDict):
    """The fields that every response repeats."""

    model_name: str
    model_version: str
    id: NotRequired[str]


class TritonTensors(TypedDict, total=False):
    """Output tensors other than the text, on request."""

    cum_log_probs: Numbers
    output_log_probs: Numbers
    context_logits: Numbers
    generation_logits: Numbers


class TritonExtras(TypedDict, total=False):
    """TensorRT-LLM's further fields, on request."""

    finish_reason: Texts
    cumulative_logprob: Numbers
    num_input_tokens: Count
    num_output_tokens: Counts


class TritonResponse(TritonHead, TritonTensors, TritonExtras):
    text_output: str | list[str]


# -- other routes ------------------------------------------------------------------------------------------------


class TritonServer(TypedDict):
    name: str
    version: str
    extensions: list[str]


class TritonState(TypedDict):
    """Of a model, in the repository's index."""

    name: str
    version: str
    state: str
    reason: NotRequired[str]


class TritonTensor(TypedDict):
    name: str
    datatype: str
    shape: list[int]


class TritonMetadata(TypedDict):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TritonTensor]
    outputs: list[TritonTensor]


class TritonTensorConfig(TypedDict):
    name: str
    data_type: str
    dims: list[int]
    optional: NotRequired[bool]


class TransactionPolicy(TypedDict):
    decoupled: bool


class TritonConfig(TypedDict):
    name: str
    platform: str
    backend: str
    max_batch_size: Count
    input: list[TritonTensorConfig]
    output: list[TritonTensorConfig]
    model_transaction_policy: TransactionPolicy


# -- Triton's errors: `{"error"}` under few statuses -------------------------------------------------------------------


class TritonError(TypedDict):
    error: str


EVENTS = SSE._replace(content_type="text/event-stream; charset=utf-8")


class OneResponse(InvalidPayload):
    """`/generate` was asked for a stream. Triton answers it with status 200, because a response came."""

    status = 200

    def __init__(self) -> None:
        super().__init__(
            "generate expects model to produce exactly 1 response, use generate stream for model that generates "
            "various number of responses"
        )


class TritonErrors(ErrorFormat):
    """Triton has 500 for values of a wrong type and for bodies that are not JSON; its own document says 400.

    Args:
        events: a failure of the model is an event.
    """

    statuses = MappingProxyType({ServingError: 400, UnsupportedMedia: 400, TooLarge: 400})

    def __init__(self, *, events: bool = False) -> None:
        self._events = events

    def body(self, error: ServingError) -> TritonError:
        message = error.message
        if isinstance(error, NotJson):
            message = f"failed to parse the request JSON buffer: {message}"
        elif isinstance(error, MethodNotAllowed):
            message = "Method Not Allowed"
        elif isinstance(error, NotFound):
            message = _not_found(error)
        return {"error": message}

    def response(self, error: ServingError) -> HttpResponse:
        if self._events and isinstance(error, GenerationFailed):
            return HttpResponse(self.status(error), EVENTS.content_type, EVENTS.encode(self.body(error)))
        return super().response(error)


ERRORS = TritonErrors()


def _not_found(error: NotFound) -> str:
    if not isinstance(error, ModelNotFound):
        return error.message
    if error.version in ("", "1"):
        return f"Request for unknown model: '{error.name}' is not found{error.served}"
    if error.version.isascii() and error.version.isdecimal():
        return f"Request for unknown model: '{error.name}' version {error.version} is not found"
    return "Not Found"  # Triton's routes have versions of digits only
