"""The kinds of servers: which parameters each kind supports, and what a request body contains.

Sources: vLLM's `CompletionRequest` (vllm/entrypoints/openai/completion/protocol.py, 0.33); Dynamo's
`NvCreateCompletionRequest` (lib/llm/src/protocols/openai, 1.6), and observations of its front end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.media import MEDIA
from handler.core.values import Sampling
from handler.engines.base import (
    COMMON_RULES,
    JSON_TAGS,
    Capabilities,
    Rule,
    arguments,
    drawn_or,
    drawn_rules,
    unless_neutral,
)

_MOST_BIAS = 100.0
"""Largest bias that vLLM uses. vLLM silently reduces larger biases to this limit."""

_REASONS = {
    "num_beams": "beam search cannot be streamed",
    "typical_p": "typical decoding is not supported",
    "no_repeat_ngram_size": "repeated n-grams cannot be forbidden",
    "bad_token_ids": "ids cannot be forbidden; a bias of -100 has nearly the same effect",
    "prompt_logprobs": "log-probabilities of the prompt cannot be streamed",
    "return_context_logits": "the servers return no logits",
    "return_generation_logits": "the servers return no logits",
}
"""Maps each Sampling field that no server supports to the reason."""


class ServerKind(NamedTuple):
    """One kind of server.

    Attributes:
        owner: prefix of `owned_by` in the server's models; vLLM's Rust front end writes `vllm-frontend-rs`.
        reasons: maps a Sampling field to the reason why the server does not support it.
        limits: as in `Capabilities`.
        ask: request fields that make the server return token ids.
        ranked: whether the server's log-probabilities identify tokens by id.
        structural_tags: as in `Capabilities`.
        label_reason: as in `Capabilities`.
    """

    owner: str
    reasons: Mapping[str, str]
    limits: Mapping[str, float]
    ask: Mapping[str, Any]
    ranked: bool = True
    structural_tags: frozenset[str] = frozenset()
    label_reason: str = ""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            SUPPORTS,
            {**_REASONS, **self.reasons},
            limits={"temperature": 2.0, **self.limits},
            no_adapters="adapters are loaded by the server at option.base_url, which serves each adapter as a model",
            no_media=dict.fromkeys(MEDIA, "the server at option.base_url receives only tokens"),
            structural_tags=self.structural_tags,
            label_reason=self.label_reason,
        )


KINDS = {
    "vllm": ServerKind("vllm", {}, {}, {"return_token_ids": True}, structural_tags=JSON_TAGS),
    "dynamo": ServerKind(
        "nvidia",
        {
            "logit_bias": "Dynamo silently drops it",
            "bad_sequences": "Dynamo refuses bad_words",
            "allowed_token_ids": "Dynamo drops it",
            "cache_salt": "older releases of Dynamo drop it",
        },
        {"top_logprobs": 5},
        {"nvext": {"extra_fields": ["completion_token_ids"]}},
    ),
    "lmi": ServerKind(
        "lmi-handler",
        {"top_logprobs": "the server does not return ids of alternatives"},
        {},
        {"return_token_ids": True},
        ranked=False,
        label_reason="a server of the kind lmi returns no ids of alternatives; send decisions to that server itself",
    ),
}
"""Maps each value of option.base_url_kind to its kind, for servers that are used through OpenAI's API."""

OWNERS: Mapping[str, str] = {**{name: kind.owner for name, kind in KINDS.items()}, "llamacpp": "llamacpp"}
"""Maps each value of option.base_url_kind to the prefix of `owned_by` in the server's models."""


def _seed(sampling: Sampling) -> dict[str, Any]:
    return {} if sampling.seed is None else {"seed": sampling.signed_seed}


def _logprobs(sampling: Sampling, kind: str) -> dict[str, Any]:
    if not (sampling.logprobs or sampling.top_logprobs):
        return {}
    ranked = {"return_tokens_as_token_ids": True} if KINDS[kind].ranked else {}
    return {"logprobs": sampling.top_logprobs, **ranked}  # 0: only for the chosen token


def _bias(logit_bias: Sequence[tuple[int, float]]) -> dict[str, float]:
    if any(abs(bias) > _MOST_BIAS for _, bias in logit_bias):
        raise ValueError(f"logit_bias: the server accepts -{_MOST_BIAS:g} to {_MOST_BIAS:g}")
    return {str(id): bias for id, bias in logit_bias}


def _guide(sampling: Sampling, kind: str) -> dict[str, Any]:
    """Return the field for structured output: `structured_outputs`, or `guided_...` for Dynamo, as in older vLLM."""
    rule = sampling.structured_output
    if rule is None:
        return {}
    name = {"json_schema": "json"}.get(rule.kind, rule.kind)
    value: Any = rule.value
    if rule.kind in ("json_schema", "choice"):
        value = json.loads(rule.value)
    if kind != "dynamo":
        return {"structured_outputs": {name: True if rule.kind == "json_object" else value}}
    if rule.kind == "json_object":
        return {"guided_json": {"type": "object"}}
    return {f"guided_{name}": value}


_DRAWN: Mapping[str, Rule] = {**drawn_rules(no_top_k=-1), "seed": _seed}
"""Rules for the fields that matter only when sampling."""

_TABLE: Mapping[str, Rule] = {
    **COMMON_RULES,
    "max_new_tokens": lambda sampling, kind: {"max_tokens": max(sampling.max_new_tokens, 1)},
    "min_new_tokens": "min_tokens",
    "do_sample": drawn_or({"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}, _DRAWN),
    "logprobs": _logprobs,
    "top_logprobs": _logprobs,
    "bad_sequences": unless_neutral("bad_sequences", "bad_words", list),
    "logit_bias": unless_neutral("logit_bias", make=_bias),
    "allowed_token_ids": unless_neutral("allowed_token_ids", make=list),
    "cache_salt": unless_neutral("cache_salt"),
    "structured_output": _guide,
}

SUPPORTS = frozenset({*_TABLE, *_DRAWN})


def completion(kind: str, model: str, ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
    """Return the body for /v1/completions. It also contains neutral values, as server defaults may differ.

    Raises:
        ValueError: the server does not support a value in `sampling`; the exception says why.
    """
    beside = {"model": model, "prompt": list(ids), "stream": True, "n": 1}
    counts = {"stream_options": {"include_usage": True}}
    return {**beside, **counts, **KINDS[kind].ask, **arguments(_TABLE, sampling, kind)}
