"""The types of Triton's answers. Each field of the wire is declared here, for the API's document too."""

from __future__ import annotations

from typing import TypedDict

from handler.protocols.kernel.json_schema import Count, NotRequired

Numbers = float | list[float | None]
"""A tensor of one element is that element; others are flat lists."""

Texts = str | None | list[str | None]
Counts = Count | list[Count]


class TritonHead(TypedDict):
    """What every response repeats."""

    model_name: str
    model_version: str
    id: NotRequired[str]


class TritonTensors(TypedDict, total=False):
    """Output tensors beside the text, on request."""

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


class TritonError(TypedDict):
    error: str
