"""Translates Sampling into the keywords of vLLM's SamplingParams (vllm/sampling_params.py)."""

from __future__ import annotations

import json
from typing import Any

from handler.core.values import Sampling, StructuredOutput

_FORBIDDEN = -1e9  # added to a logit


def sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    """Make the keywords of SamplingParams, except output kind and structured output.

    Stop strings are left out: `core/sequence.py` finds them, so that vLLM need not make text at all.
    """
    arguments: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "ignore_eos": sampling.ignore_eos,
        "detokenize": False,
        "temperature": 0.0,
    }
    if sampling.do_sample and sampling.temperature > 0:
        arguments |= {
            "temperature": sampling.temperature,
            "top_k": 1 if sampling.top_p == 0 else sampling.top_k,  # the smallest nucleus is one token
            "top_p": sampling.top_p or 1.0,
            "min_p": sampling.min_p,
            "seed": sampling.signed_seed,
        }
    if sampling.logprobs or sampling.top_logprobs:
        arguments["logprobs"] = sampling.top_logprobs  # 0: the chosen token's alone
    if sampling.stop_token_ids:
        arguments["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.bad_sequences:
        arguments["bad_words"] = list(sampling.bad_sequences)
    if sampling.logit_bias or sampling.bad_token_ids:
        # A large negative bias forbids a token.
        arguments["logit_bias"] = dict(sampling.logit_bias) | dict.fromkeys(sampling.bad_token_ids, _FORBIDDEN)
    if sampling.prompt_logprobs:
        arguments["prompt_logprobs"] = sampling.prompt_top_logprobs  # 0: its own tokens' alone
    return arguments


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
