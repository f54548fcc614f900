"""Translates Sampling into the keywords of vLLM's SamplingParams (vllm/sampling_params.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from handler.core.values import Sampling, StructuredOutput
from handler.engines.base import COMMON_RULES, Rule, arguments, drawn_or, top_choice, unless_neutral

FORBIDDEN = -1e9
"""Added to the logit of a token that must not come."""


def _logprobs(sampling: Sampling) -> dict[str, Any]:
    if not (sampling.logprobs or sampling.top_logprobs):
        return {}
    return {"logprobs": sampling.top_logprobs}  # 0: the chosen token's alone


def _prompt_logprobs(sampling: Sampling) -> dict[str, Any]:
    if not sampling.prompt_logprobs:
        return {}
    return {"prompt_logprobs": sampling.prompt_top_logprobs}  # 0: its own tokens' alone


def _bias(sampling: Sampling) -> dict[str, Any]:
    """Forbid tokens by a large negative bias."""
    bias = dict(sampling.logit_bias) | dict.fromkeys(sampling.bad_token_ids, FORBIDDEN)
    return {"logit_bias": bias} if bias else {}


def _structured_outputs(sampling: Sampling) -> dict[str, Any]:
    if sampling.structured_output is None:
        return {}
    return {"structured_outputs": structured_output_arguments(sampling.structured_output)}


def _by_beam_search(sampling: Sampling) -> dict[str, Any]:
    """Leave it to `engine.py`, which asks vLLM for single tokens."""
    return {}


_DRAWN: Mapping[str, Rule] = {
    "temperature": "temperature",
    "top_k": top_choice,
    "top_p": top_choice,
    "min_p": "min_p",
    "seed": lambda sampling: {"seed": sampling.signed_seed},
}
"""Fields that count where tokens are drawn."""

_TABLE: Mapping[str, Rule] = {
    **COMMON_RULES,
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "do_sample": drawn_or({"temperature": 0.0}, _DRAWN),
    "logprobs": _logprobs,
    "top_logprobs": _logprobs,
    "bad_sequences": unless_neutral("bad_sequences", "bad_words", list),
    "bad_token_ids": _bias,
    "logit_bias": _bias,
    "prompt_logprobs": _prompt_logprobs,
    "prompt_top_logprobs": _prompt_logprobs,
    "structured_output": _structured_outputs,
    "num_beams": _by_beam_search,
    "length_penalty": _by_beam_search,
    "early_stopping": _by_beam_search,
}

SUPPORTS = frozenset({*_TABLE, *_DRAWN})


def sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    """Make the keywords of SamplingParams, except the output kind; `structured_outputs` holds those of its class.

    Stop strings are left out: `core/text.py` finds them, so that vLLM need not make text at all.
    """
    return {"detokenize": False, **arguments(_TABLE, sampling)}


def structured_output_arguments(structured_output: StructuredOutput) -> dict[str, Any]:
    """Make the keywords of StructuredOutputsParams."""
    match structured_output.kind:
        case "json_schema":
            return {"json": structured_output.value}
        case "json_object":
            return {"json_object": True}
        case "choice":
            return {"choice": json.loads(structured_output.value)}
        case kind:
            return {kind: structured_output.value}
