"""SGLang's sampling parameters (sglang/srt/sampling/sampling_params.py, 0.5.23), which both of its APIs have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.core.values import Sampling
from handler.engines.base import COMMON_RULES, Rule, drawn_or, drawn_rules, regex_of

_FORBIDDEN = -1e9  # added to the logit of a forbidden token


def _bias(sampling: Sampling, *more: Any) -> dict[str, Any]:
    bias = dict(sampling.logit_bias) | dict.fromkeys(sampling.bad_token_ids, _FORBIDDEN)
    return {"logit_bias": {str(id): value for id, value in bias.items()}} if bias else {}


def guide(sampling: Sampling, grammar: str) -> dict[str, Any]:
    """Return the parameter for structured output.

    Args:
        grammar: name of the parameter for EBNF.
    """
    rule = sampling.structured_output
    if rule is None:
        return {}
    match rule.kind:
        case "json_object":
            return {"json_schema": '{"type": "object"}'}
        case "choice":
            return {"regex": regex_of(rule.value)}
        case "grammar":
            return {grammar: rule.value}
        case kind:
            return {kind: rule.value}


DRAWN = drawn_rules(no_top_k=-1)
"""Rules for the fields that matter only when sampling."""

GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}

TABLE: Mapping[str, Rule] = {
    **COMMON_RULES,
    "max_new_tokens": lambda sampling: {"max_new_tokens": max(sampling.max_new_tokens, 1)},
    "min_new_tokens": "min_new_tokens",
    "do_sample": drawn_or(GREEDY, DRAWN),
    "logit_bias": _bias,
    "bad_token_ids": _bias,
}


def misses_stops(sampling: Sampling) -> bool:
    """Return whether SGLang would miss stop tokens: with ignore_eos, it looks for none (managers/schedule_batch.py)."""
    return sampling.ignore_eos
