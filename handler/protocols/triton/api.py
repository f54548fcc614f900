"""The types of Triton's responses. They declare every field on the wire, for mypy and the OpenAPI document."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, TypedDict

from handler.core.errors import (
    GenerationFailed,
    InvalidPayload,
    MethodNotAllowed,
    ModelNotFound,
    NotJson,
    ServingError,
    TooLarge,
    UnsupportedMedia,
)
from handler.core.framing import SSE
from handler.core.numbers import is_digits
from handler.protocols.kernel.errors import ErrorFormat, HttpResponse
from handler.protocols.kernel.schema import Count, NotRequired

VERSION = "1"
"""The version of the served model."""

Numbers = float | list[float | None]
"""A tensor with one element is written as a number. Other tensors are written as flat lists."""

Texts = str | None | list[str | None]
Counts = Count | list[Count]


class TritonHead(TypedDict):
    """The fields of every response and every event. `id` is present if the request has an id."""

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
    """Additional fields from TensorRT-LLM, on request."""

    finish_reason: Texts
    cumulative_logprob: Numbers
    num_input_tokens: Count
    num_output_tokens: Counts


class TritonResponse(TritonHead, TritonTensors, TritonExtras):
    text_output: str | list[str]


# -- infer: tensors as JSON or binary data -----------------------------------------------------------------------------


class InferTensor(TypedDict):
    """A tensor of a request or a response. `data` is missing if it is sent as binary data."""

    name: str
    datatype: str
    shape: list[Count]
    data: NotRequired[list[Any]]
    parameters: NotRequired[dict[str, Any]]


class InferResponse(TritonHead):
    outputs: list[InferTensor]


# -- other routes ------------------------------------------------------------------------------------------------


class TritonServer(TypedDict):
    name: str
    version: str
    extensions: list[str]


class TritonState(TypedDict):
    """The state of a model in the index of the model repository."""

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


class TritonModelStatistics(TypedDict):
    name: str
    version: str
    last_inference: Count
    inference_count: Count
    execution_count: Count
    inference_stats: dict[str, dict[str, Count]]
    response_stats: dict[str, Any]
    batch_stats: list[Any]
    memory_usage: list[Any]


class TritonStatistics(TypedDict):
    model_stats: list[TritonModelStatistics]


def statistics(name: str, durations: dict[str, dict[str, int]], last: int) -> TritonStatistics:
    """Build the statistics of the model.

    Args:
        durations: the number of requests and their total duration in nanoseconds, for each outcome and phase.
        last: the time when the last request ended, in milliseconds since 1970.
    """
    count = durations["success"]["count"]
    model: TritonModelStatistics = {
        "name": name,
        "version": VERSION,
        "last_inference": last,
        "inference_count": count,
        "execution_count": count,
        "inference_stats": durations,
        "response_stats": {},
        "batch_stats": [],
        "memory_usage": [],
    }
    return {"model_stats": [model]}


# -- Triton's errors, `{"error"}`, with its statuses -------------------------------------------------------------------


class TritonError(TypedDict):
    error: str


EVENTS = SSE._replace(content_type="text/event-stream; charset=utf-8")


class OneResponse(InvalidPayload):
    """A request for a stream was sent to `/generate`. As in Triton, the status is 200."""

    status = 200

    def __init__(self) -> None:
        super().__init__(
            "generate expects model to produce exactly 1 response, use generate stream for model that generates "
            "various number of responses"
        )


class TritonErrors(ErrorFormat):
    """Triton's errors. Errors without their own status get 400, as documented, although Triton itself may send 500.

    Args:
        events: whether to send model failures as events.
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
        elif isinstance(error, ModelNotFound):
            message = _unknown_model(error)
        return {"error": message}

    def response(self, error: ServingError) -> HttpResponse:
        if self._events and isinstance(error, GenerationFailed):
            return HttpResponse(self.status(error), EVENTS.content_type, EVENTS.encode(self.body(error)))
        return super().response(error)


ERRORS = TritonErrors()


def _unknown_model(error: ModelNotFound) -> str:
    if error.version in ("", "1"):
        return f"Request for unknown model: '{error.name}' is not found{error.served}"
    if is_digits(error.version):
        return f"Request for unknown model: '{error.name}' version {error.version} is not found"
    return "Not Found"  # Triton's routes only match versions of digits
