"""The types of vLLM's answers. Each field of the wire is declared here, for the API's document too."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from handler.protocols.kernel.schema.types import Count


class VllmTokens(TypedDict):
    """A prompt's tokens; `token_strs` has their texts where the request asks for them."""

    count: Count
    max_model_len: Count | None
    tokens: list[Count]
    token_strs: list[str] | None


class VllmText(TypedDict):
    prompt: str


class VllmVersion(TypedDict):
    version: str


class VllmLoad(TypedDict):
    server_load: Count


class VllmScore(TypedDict):
    index: Count
    object: Literal["score"]
    score: float | None


class VllmUsage(TypedDict):
    prompt_tokens: Count
    total_tokens: Count
    completion_tokens: Count
    prompt_tokens_details: None


class VllmScores(TypedDict):
    """The scores of pairs, in their order."""

    id: str
    object: Literal["list"]
    created: Count
    model: str
    data: list[VllmScore]
    usage: VllmUsage


class VllmLabel(TypedDict):
    """A text's likeliest label, and the probabilities of all."""

    index: Count
    label: str | None
    probs: list[float]
    num_classes: Count


class VllmLabels(TypedDict):
    id: str
    object: Literal["list"]
    created: Count
    model: str
    data: list[VllmLabel]
    usage: VllmUsage


class VllmPooledText(TypedDict):
    """A vector, or the probabilities of labels; text is base64."""

    index: Count
    object: Literal["pooling"]
    data: Any


class VllmPooled(TypedDict):
    id: str
    object: Literal["list"]
    created: Count
    model: str
    data: list[VllmPooledText]
    usage: VllmUsage
