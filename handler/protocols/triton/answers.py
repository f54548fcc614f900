"""The types of Triton's answers. Each field of the wire is declared here, for the API's document too."""

from __future__ import annotations

from typing import TypedDict

from handler.protocols.kernel.schema.types import Count, NotRequired

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
