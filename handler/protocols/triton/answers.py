"""The types of Triton's answers. Each field of the wire is declared here, for the API's document too."""

from __future__ import annotations

from typing import TypedDict

from handler.protocols.base import Count

Numbers = float | list[float | None]
"""A tensor of one element is that element, others are flat lists."""

Texts = str | None | list[str | None]
Counts = Count | list[Count]


class _TritonResponse(TypedDict):
    model_name: str
    model_version: str
    text_output: str | list[str]


class TritonResponse(_TritonResponse, total=False):
    id: str
    cum_log_probs: Numbers
    output_log_probs: Numbers
    context_logits: Numbers
    generation_logits: Numbers
    finish_reason: Texts
    cumulative_logprob: Numbers
    num_input_tokens: Count
    num_output_tokens: Counts


class TritonError(TypedDict):
    error: str
