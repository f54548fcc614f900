"""The kinds of servers: which parameters each kind supports, and what a request body contains.

Sources: vLLM's `CompletionRequest` (vllm/entrypoints/openai/completion/protocol.py, 0.33); Dynamo's
`NvCreateCompletionRequest` (lib/llm/src/protocols/openai, 1.6), and observations of its front end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
from handler.engines.openai.sglang import NO_MEDIA, SGLANG, generate
from handler.engines.remote.servers import structured_output_of

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


_NO_ADAPTERS = "adapters are loaded by the server at option.base_url, which serves each adapter as a model"


class Completions(NamedTuple):
    """A kind of server with OpenAI's API.

    Attributes:
        ask: request fields that make the server return token ids.
        ranked: whether the server's log-probabilities identify tokens by id.
        guided: whether structured output has a field for each kind of rule, as in older releases of vLLM.
    """

    ask: Mapping[str, Any]
    ranked: bool = True
    guided: bool = False

    def body(self, model: str, ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        """Return the body for /v1/completions. It also contains neutral values, as server defaults may differ.

        Raises:
            ValueError: the server does not support a value in `sampling`; the exception says why.
        """
        beside = {"model": model, "prompt": list(ids), "stream": True, "n": 1}
        counts = {"stream_options": {"include_usage": True}}
        return {**beside, **counts, **self.ask, **arguments(_TABLE, sampling, self)}


class ServerKind(NamedTuple):
    """One kind of server.

    Attributes:
        owner: prefix of `owned_by` in the server's models; vLLM's Rust front end writes `vllm-frontend-rs`.
        capabilities: the parts of a request that the server supports.
        body: function that returns a request body for a model's name, prompt ids and sampling parameters.
    """

    owner: str
    capabilities: Capabilities
    body: Callable[[str, Sequence[int], Sampling], dict[str, Any]]


def _seed(sampling: Sampling) -> dict[str, Any]:
    return {} if sampling.seed is None else {"seed": sampling.signed_seed}


def _logprobs(sampling: Sampling, kind: Completions) -> dict[str, Any]:
    if not (sampling.logprobs or sampling.top_logprobs):
        return {}
    ranked = {"return_tokens_as_token_ids": True} if kind.ranked else {}
    return {"logprobs": sampling.top_logprobs, **ranked}  # 0: only for the chosen token


def _bias(logit_bias: Sequence[tuple[int, float]]) -> dict[str, float]:
    if any(abs(bias) > _MOST_BIAS for _, bias in logit_bias):
        raise ValueError(f"logit_bias: the server accepts -{_MOST_BIAS:g} to {_MOST_BIAS:g}")
    return {str(id): bias for id, bias in logit_bias}


def _guide(sampling: Sampling, kind: Completions) -> dict[str, Any]:
    """Return the field for structured output: `structured_outputs` or `guided_...`."""
    rule = structured_output_of(sampling)
    if rule is None:
        return {}
    name = {"json_schema": "json"}.get(rule.kind, rule.kind)
    value: Any = rule.value
    if rule.kind in ("json_schema", "choice"):
        value = json.loads(rule.value)
    if not kind.guided:
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


def _served_by(owner: str, completions: Completions, reasons: Mapping[str, str], **more: Any) -> ServerKind:
    """Return a kind of server with OpenAI's API.

    Args:
        reasons: as in `Capabilities`, in addition to what no such server supports.
        more: further attributes of `Capabilities`.
    """
    limits = {"temperature": 2.0, **more.pop("limits", {})}
    capabilities = Capabilities(
        SUPPORTS, {**_REASONS, **reasons}, limits=limits, no_adapters=_NO_ADAPTERS, no_media=NO_MEDIA, **more
    )
    return ServerKind(owner, capabilities, completions.body)


KINDS = {
    "vllm": _served_by("vllm", Completions({"return_token_ids": True}), {}, structural_tags=JSON_TAGS),
    "dynamo": _served_by(
        "nvidia",
        Completions({"nvext": {"extra_fields": ["completion_token_ids"]}}, guided=True),
        {
            "logit_bias": "Dynamo silently drops it",
            "bad_sequences": "Dynamo refuses bad_words",
            "allowed_token_ids": "Dynamo drops it",
            "cache_salt": "older releases of Dynamo drop it",
        },
        limits={"top_logprobs": 5},
    ),
    "lmi": _served_by(
        "lmi-handler",
        Completions({"return_token_ids": True}, ranked=False),
        {"top_logprobs": "the server does not return ids of alternatives"},
        label_reason="a server of the kind lmi returns no ids of alternatives; send decisions to that server itself",
    ),
    "sglang": ServerKind("sglang", SGLANG, generate),
}
"""Maps each value of option.base_url_kind to its kind, except llamacpp."""

OWNERS: Mapping[str, str] = {**{name: kind.owner for name, kind in KINDS.items()}, "llamacpp": "llamacpp"}
"""Maps each value of option.base_url_kind to the prefix of `owned_by` in the server's models."""
