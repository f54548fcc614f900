"""Translates Sampling into OpenVINO GenAI's GenerationConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.core.values import Sampling
from handler.engines.openvino.structured_output import genai_arguments
from handler.engines.sampling import Rule, arguments

_MAX_SEED = (1 << 63) - 1  # the binding takes a signed 64-bit number


def _ends(sampling: Sampling, eos: frozenset[int]) -> dict[str, Any]:
    if sampling.ignore_eos:  # GenAI then ignores every stop id, so _output finds the request's own
        return {"ignore_eos": True}
    # To xgrammar every stop id is an end, so with a schema _output finds the request's own.
    others = set() if sampling.structured_output is not None else set(sampling.stop_token_ids)
    return {"eos_token_id": min(eos) if eos else -1, "stop_token_ids": set(eos) | others}


def _structured_output(sampling: Sampling, eos: frozenset[int]) -> dict[str, Any]:
    import openvino_genai as genai

    if sampling.structured_output is None:
        return {}
    if sampling.num_beams > 1 or sampling.ignore_eos or sampling.min_new_tokens:
        raise ValueError("structured output excludes num_beams > 1, ignore_eos and a minimum length")
    return {"structured_output_config": genai.StructuredOutputConfig(**genai_arguments(sampling.structured_output))}


def _beams(sampling: Sampling, eos: frozenset[int]) -> dict[str, Any]:
    import openvino_genai as genai

    if sampling.num_beams == 1:
        return {}
    criteria = genai.StopCriteria
    return {
        "num_beams": sampling.num_beams,
        "num_return_sequences": sampling.num_beams,
        "length_penalty": sampling.length_penalty,
        "stop_criteria": criteria.EARLY if sampling.early_stopping else criteria.HEURISTIC,
    }


def _choice(sampling: Sampling, eos: frozenset[int]) -> dict[str, Any]:
    if sampling.num_beams > 1 or not sampling.do_sample or sampling.temperature <= 0:
        return {}
    return {"do_sample": True, **arguments(_DRAWN, sampling)}


def _seed(sampling: Sampling) -> dict[str, Any]:
    return {"rng_seed": (sampling.seed or 0) & _MAX_SEED}


def _top(sampling: Sampling) -> dict[str, Any]:
    if sampling.top_p == 0:  # the smallest nucleus is the most likely token alone
        return {"top_k": 1}
    return {"top_p": sampling.top_p, **({"top_k": sampling.top_k} if sampling.top_k > 0 else {})}


def _by_scorer(sampling: Sampling, eos: frozenset[int]) -> dict[str, Any]:
    """Leave it to `scorers/`."""
    return {}


_DRAWN: Mapping[str, Rule] = {
    "temperature": "temperature",
    "seed": _seed,
    "min_p": "min_p",
    "top_p": _top,
    "top_k": _top,
}
"""Fields that count where tokens are drawn."""

_TABLE: Mapping[str, Rule] = {
    "max_new_tokens": "max_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "ignore_eos": _ends,
    "stop_token_ids": _ends,
    "structured_output": _structured_output,
    "num_beams": _beams,
    "length_penalty": _beams,
    "early_stopping": _beams,
    "do_sample": _choice,
    "prompt_logprobs": _by_scorer,
    "prompt_top_logprobs": _by_scorer,
}

SUPPORTS = frozenset({*_TABLE, *_DRAWN})


def generation_config(sampling: Sampling, eos: frozenset[int]) -> Any:
    """Make GenAI's configuration of one request.

    Args:
        eos: ids that end an answer as EOS.

    Raises:
        ValueError: GenAI refuses the parameters.
    """
    import openvino_genai as genai

    # For log-probabilities GenAI takes the exponential of each logit: a twentieth of one sequence's step.
    config = genai.GenerationConfig(logprobs=int(sampling.logprobs))
    config.apply_chat_template = False  # of a text: it has been applied
    for name, value in arguments(_TABLE, sampling, eos).items():
        setattr(config, name, value)
    config.validate()
    return config
