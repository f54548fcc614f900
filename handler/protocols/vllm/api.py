"""The types of vLLM's responses. They declare every field on the wire, for mypy and the OpenAPI document."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Literal, TypedDict

from handler.core.errors import (
    AdapterFailed,
    Conflict,
    Overloaded,
    ServingError,
)
from handler.protocols.kernel.errors import ErrorFormat
from handler.protocols.kernel.schema import Count
from handler.protocols.openai.api import field_of


class VllmTokens(TypedDict):
    """The tokens of a prompt. `token_strs` contains their texts if requested."""

    count: Count
    max_model_len: Count | None
    tokens: list[Count]
    token_strs: list[str] | None


class VllmText(TypedDict):
    """The text of token ids. `content` is llama-server's name for it."""

    prompt: str
    content: str


class VllmVersion(TypedDict):
    version: str


class VllmLoad(TypedDict):
    server_load: Count


class VllmHead(TypedDict):
    """The fields that the responses of /score, /classify and /pooling have in common."""

    id: str
    object: Literal["list"]
    created: Count
    model: str


class VllmScore(TypedDict):
    index: Count
    object: Literal["score"]
    score: float | None


class VllmUsage(TypedDict):
    prompt_tokens: Count
    total_tokens: Count
    completion_tokens: Count
    prompt_tokens_details: None


class VllmScores(VllmHead):
    """The scores of the pairs, in the order of the request."""

    data: list[VllmScore]
    usage: VllmUsage


class VllmLabel(TypedDict):
    """The most likely label of a text, and the probabilities of all labels."""

    index: Count
    label: str | None
    probs: list[float]
    num_classes: Count


class VllmLabels(VllmHead):
    data: list[VllmLabel]
    usage: VllmUsage


class VllmPooledText(TypedDict):
    """The result for one text. `data` is an embedding or the label probabilities, as a list or as base64."""

    index: Count
    object: Literal["pooling"]
    data: Any


class VllmPooled(VllmHead):
    data: list[VllmPooledText]
    usage: VllmUsage


# -- vLLM's errors: `{"error": {"message", "type", "param", "code"}}`, where `code` is the status ----------------------


class VllmErrorFields(TypedDict):
    message: str
    type: str
    param: str | None
    code: Count


class VllmError(TypedDict):
    error: VllmErrorFields


_TYPES = {
    400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 429: "TooManyRequestsError",
    501: "NotImplementedError", 503: "ServiceUnavailableError",
}  # fmt: skip


class VllmErrors(ErrorFormat):
    statuses = MappingProxyType({ServingError: 500, Overloaded: 429, Conflict: 400, AdapterFailed: 400})

    def body(self, error: ServingError) -> VllmError:
        status = self.status(error)
        kind = _TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
        return {"error": {"message": error.message, "type": kind, "param": field_of(error), "code": status}}


ERRORS = VllmErrors()
