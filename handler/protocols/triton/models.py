"""The tensors of the models in TensorRT-LLM's repositories, with their datatypes and shapes, for `infer`.

Sources: NVIDIA/TensorRT-LLM, triton_backend/all_models/inflight_batcher_llm; the models of 2023 are in the history of
triton-inference-server/tensorrtllm_backend, all_models/gpt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from handler.protocols.triton.request import IDS, INPUTS, OF_OTHER_MODELS, PROMPT, PROMPT_2023


class TensorSpec(NamedTuple):
    """The datatype of a tensor, and its dimensions after the batch dimension. -1 means any size."""

    datatype: str
    dims: tuple[int, ...] = (1,)


class TensorModel(NamedTuple):
    """The tensors of a model.

    Attributes:
        prompt: the name of the required input, which identifies the model that a request is for.
        inputs: the types of all inputs, by name.
        outputs: the types of all outputs, by name.
        text: the name of the output that contains the text, or "" if there is none.
    """

    prompt: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    text: str = ""


INDICES = ("batch_index", "sequence_index")
"""Outputs of the backend that are always 0, as a response contains all sequences."""

UNBATCHED = ("text_output", "OUTPUT_0", "finish_reason", "cumulative_logprob")
"""Outputs whose shape is the number of texts, regardless of the model configuration.

TensorRT-LLM's models send this shape, and its clients read `as_numpy("text_output")[0]` as bytes.
"""

FREE = ("finish_reason", "num_input_tokens", "num_output_tokens")
"""Outputs that a request only needs to name. Others also need a flag, because perf_analyzer names all outputs."""

_NUMBERS = {
    "cum_log_probs": TensorSpec("FP32", (-1,)),
    "output_log_probs": TensorSpec("FP32", (-1, -1)),
    "context_logits": TensorSpec("FP32", (-1, -1)),
    "generation_logits": TensorSpec("FP32", (-1, -1, -1)),
    "num_input_tokens": TensorSpec("INT32"),
    "num_output_tokens": TensorSpec("INT32", (-1,)),
    **dict.fromkeys(INDICES, TensorSpec("INT32")),
}

TEXT = TensorModel(
    PROMPT,
    {
        PROMPT: TensorSpec("BYTES"),
        **{name: TensorSpec(row.datatype, row.dims) for name, row in INPUTS.items()},
    },
    {
        "text_output": TensorSpec("BYTES", (-1,)),
        "finish_reason": TensorSpec("BYTES", (-1,)),
        "cumulative_logprob": TensorSpec("FP32", (-1,)),
        **_NUMBERS,
    },
    "text_output",
)
"""The tensors of the models `ensemble`, `tensorrt_llm_bls` and `llmapi`, and of the models of vLLM's backend."""

_OTHER_MODELS = {
    **{name: TensorSpec(row.datatype, row.dims) for name, row in (*INPUTS.items(), *OF_OTHER_MODELS.items())},
    **dict.fromkeys(("early_stopping", "stop"), TensorSpec("BOOL")),
}

TOKENS = TensorModel(
    IDS,
    {IDS: _OTHER_MODELS.pop(IDS), **_OTHER_MODELS},
    {"output_ids": TensorSpec("INT32", (-1, -1)), "sequence_length": TensorSpec("INT32", (-1,)), **_NUMBERS},
)
"""The tensors of `tensorrt_llm`, which reads and writes token ids. It also accepts the other inputs of `TEXT`."""

_ENSEMBLE_2023 = TensorModel(
    PROMPT_2023,
    {PROMPT_2023: TensorSpec("BYTES"), **_OTHER_MODELS},
    {"OUTPUT_0": TensorSpec("BYTES", (-1,))},
    "OUTPUT_0",
)
"""The tensors of the `ensemble` of 2023, before its inputs had descriptive names."""

_BY_PROMPT = {model.prompt: model for model in (TOKENS, _ENSEMBLE_2023)}


def model_of(tensors: Sequence[Any]) -> TensorModel:
    """Return the model that the input tensors of a request are for."""
    names = (tensor.get("name") if isinstance(tensor, dict) else None for tensor in tensors)
    return next((_BY_PROMPT[name] for name in names if isinstance(name, str) and name in _BY_PROMPT), TEXT)


def find_model(name: str) -> TensorModel:
    """Return the tensors of the served model under this name."""
    return TOKENS if name == "tensorrt_llm" else TEXT
