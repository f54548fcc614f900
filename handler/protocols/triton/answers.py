"""The types of Triton's answers. Each field of the wire is declared here, for the API's document too."""

from __future__ import annotations

from typing import TypedDict

from handler.protocols.kernel.json_schema import Count, NotRequired

Numbers = float | list[float | None]
"""A tensor of one element is that element; others are flat lists."""

Texts = str | None | list[str | None]
Counts = Count | list[Count]


class TritonResponse(TypedDict):
    model_name: str
    model_version: str
    text_output: str | list[str]
    id: NotRequired[str]
    cum_log_probs: NotRequired[Numbers]
    output_log_probs: NotRequired[Numbers]
    context_logits: NotRequired[Numbers]
    generation_logits: NotRequired[Numbers]
    finish_reason: NotRequired[Texts]
    cumulative_logprob: NotRequired[Numbers]
    num_input_tokens: NotRequired[Count]
    num_output_tokens: NotRequired[Counts]


class TritonError(TypedDict):
    error: str
