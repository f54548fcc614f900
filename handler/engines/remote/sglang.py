"""SGLang's sampling parameters (sglang/srt/sampling/sampling_params.py, 0.5.23), which both of its APIs have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from handler.core.values import Sampling
from handler.engines.base import COMMON_RULES, Rule, drawn_or, drawn_rules, regex_of
from handler.engines.remote.servers import Software, structured_output_of

_FORBIDDEN = -1e9  # added to the logit of a forbidden token
_TAGS_VERSION = (0, 5, 4)
"""The oldest version that reads structural tags with a `format`. Older ones end when they receive one."""
_PENALTY_VERSION = (0, 5, 10)
"""The oldest of the versions that were read in which `repetition_penalty` has an effect."""
STARTED = "the SGLang server was started with"

SOFTWARE = Software("sglang", "; older versions with --reasoning-parser do so only after the reasoning has ended")


def _bias(sampling: Sampling, *more: Any) -> dict[str, Any]:
    bias = dict(sampling.logit_bias) | dict.fromkeys(sampling.bad_token_ids, _FORBIDDEN)
    return {"logit_bias": {str(id): value for id, value in bias.items()}} if bias else {}


def guide(sampling: Sampling, grammar: str) -> dict[str, Any]:
    """Return the parameter for structured output.

    Args:
        grammar: name of the parameter for EBNF.

    Raises:
        ValueError: it contains NUL characters.
    """
    rule = structured_output_of(sampling)
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


def version_of(text: Any) -> tuple[int, ...]:
    """Return the numbers of a server's version, or an empty tuple if it has no three numbers."""
    match = re.match(r"([0-9]+)\.([0-9]+)\.([0-9]+)", str(text))
    return () if match is None else tuple(map(int, match.groups()))


class SglangFlags(NamedTuple):
    """The version and the flags of a server, as far as parameters of both APIs depend on them.

    Attributes:
        speculates: whether it was started with --speculative-algorithm. It then ignores `min_p`.
        tokenizes: whether it has a tokenizer, and was not started with --skip-tokenizer-init.
        reads_tags: whether its version reads structural tags. A build without a version number counts as new.
        penalizes: whether its version applies `repetition_penalty`.
    """

    speculates: bool = False
    tokenizes: bool = True
    reads_tags: bool = True
    penalizes: bool = True

    @classmethod
    def read(cls, arguments: Mapping[str, Any], version: tuple[int, ...]) -> SglangFlags:
        """Read a server's arguments. Older versions lack some of them."""
        return cls(
            bool(arguments.get("speculative_algorithm")),
            not arguments.get("skip_tokenizer_init"),
            not any(version) or version >= _TAGS_VERSION,
            not any(version) or version >= _PENALTY_VERSION,
        )

    def refusal(self, *, min_p: float, min_tokens: int, repetition_penalty: float, guide: str | None) -> str:
        """Return why the server would ignore one of these parameters or fail on it; "" if it supports all of them.

        Args:
            guide: name of the request's parameter for structured output; None if it has none.
        """
        if min_p and self.speculates:
            return f"min_p: {STARTED} --speculative-algorithm, and then ignores it"
        if repetition_penalty != 1 and not self.penalizes:
            return "repetition_penalty: SGLang before 0.5.10 ignores it"
        needing = "min_tokens" if min_tokens else "structured output" if guide else ""
        if needing and not self.tokenizes:
            return f"{needing}: {STARTED} --skip-tokenizer-init, and needs its tokenizer for it"
        if guide == "structural_tag" and not self.reads_tags:
            return "structured output: SGLang before 0.5.4 does not support structural tags, which tools need"
        return ""


DRAWN = drawn_rules(no_top_k=-1)
"""Rules for the fields that matter only when sampling."""

GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}

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
