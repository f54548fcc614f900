"""Translates Sampling into OpenVINO GenAI's GenerationConfig."""

from __future__ import annotations

from typing import Any

from handler.core.values import Sampling
from handler.engines.openvino.structured_output import genai_arguments

_MAX_SEED = (1 << 63) - 1  # the binding takes a signed 64-bit number


def generation_config(sampling: Sampling, eos: frozenset[int]) -> Any:
    """Make GenAI's configuration of one request.

    Args:
        eos: ids that end an answer as EOS.

    Raises:
        ValueError: GenAI refuses the parameters.
    """
    import openvino_genai as genai

    config = genai.GenerationConfig(max_new_tokens=sampling.max_new_tokens, logprobs=1)
    config.apply_chat_template = False  # of a text: it has been applied
    config.min_new_tokens = sampling.min_new_tokens
    config.repetition_penalty = sampling.repetition_penalty
    config.presence_penalty = sampling.presence_penalty
    config.frequency_penalty = sampling.frequency_penalty
    if sampling.ignore_eos:
        # GenAI then ignores every stop id, so _output finds the request's own.
        config.ignore_eos = True
    else:
        config.eos_token_id = min(eos) if eos else -1
        # To xgrammar every stop id is an end, so with a schema _output finds the request's own.
        others = set() if sampling.structured_output is not None else set(sampling.stop_token_ids)
        config.stop_token_ids = set(eos) | others
    if sampling.structured_output is not None:
        if sampling.num_beams > 1 or sampling.ignore_eos or sampling.min_new_tokens:
            raise ValueError("a guide excludes num_beams > 1, ignore_eos and a least length")
        config.structured_output_config = genai.StructuredOutputConfig(**genai_arguments(sampling.structured_output))
    if sampling.num_beams > 1:
        config.num_beams = config.num_return_sequences = sampling.num_beams
        config.length_penalty = sampling.length_penalty
        criteria = genai.StopCriteria
        config.stop_criteria = criteria.EARLY if sampling.early_stopping else criteria.HEURISTIC
    elif sampling.do_sample and sampling.temperature > 0:
        config.do_sample = True
        config.temperature = sampling.temperature
        config.rng_seed = (sampling.seed or 0) & _MAX_SEED
        config.min_p = sampling.min_p
        if sampling.top_p > 0:
            config.top_p = sampling.top_p
        if sampling.top_k > 0:
            config.top_k = sampling.top_k
        if sampling.top_p == 0:  # the smallest nucleus is the most likely token alone
            config.top_k = 1
    config.validate()
    return config
