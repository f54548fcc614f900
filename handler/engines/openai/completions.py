"""Kinds of servers whose /v1/completions takes and returns token ids: what they support, and a request's body.

Sources: vLLM's `CompletionRequest` (vllm/entrypoints/openai/completion/protocol.py, 0.33); Dynamo's
`NvCreateCompletionRequest` (lib/llm/src/protocols/openai, 1.6), and observations of its front end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from handler.core.values import Sampling
from handler.engines.base import (
    COMMON_RULES,
    JSON_TAGS,
    Capabilities,
    EngineConfig,
    Rule,
    arguments,
    drawn_or,
    drawn_rules,
    unless_neutral,
)
from handler.engines.openai.kind import NO_MEDIA, ServerKind
from handler.engines.openai.url_engine import UrlEngine
from handler.engines.remote.servers import VLLM, Software, structured_output_of

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


@dataclass(frozen=True)
class Completions(ServerKind):
    """A kind of server with OpenAI's API. vLLM's Rust front end owns its models as `vllm-frontend-rs`.

    Attributes:
        able: the parts of a request that the servers support.
        ask: request fields that make the servers return token ids.
        ranked: whether the servers' log-probabilities identify tokens by id.
        guided: whether structured output has a field for each kind of rule, as in older releases of vLLM.
        takes_ends: whether the servers receive a model's end tokens. Their flags may make them use others.
    """

    software: Software
    owner: str
    able: Capabilities
    ask: Mapping[str, Any]
    ranked: bool = True
    guided: bool = False
    takes_ends: bool = False

    def capabilities(self, config: EngineConfig) -> Capabilities:
        return self.able

    def load(self, config: EngineConfig) -> UrlEngine:
        return UrlEngine(config, self, self.body, takes_ends=self.takes_ends)

    def body(self, model: str, ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        """Return the body for /v1/completions. It also contains neutral values, as server defaults may differ.

        Raises:
            ValueError: the server does not support a value in `sampling`; the exception says why.
        """
        beside = {"model": model, "prompt": list(ids), "stream": True, "n": 1}
        counts = {"stream_options": {"include_usage": True}}
        return {**beside, **counts, **self.ask, **arguments(_TABLE, sampling, self)}


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


def _able(reasons: Mapping[str, str], **more: Any) -> Capabilities:
    """Return what a kind of server supports.

    Args:
        reasons: as in `Capabilities`, in addition to what no such server supports.
        more: further attributes of `Capabilities`.
    """
    limits = {"temperature": 2.0, **more.pop("limits", {})}
    return Capabilities(
        SUPPORTS, {**_REASONS, **reasons}, limits=limits, no_adapters=_NO_ADAPTERS, no_media=NO_MEDIA, **more
    )


_RETURN_IDS = {"return_token_ids": True}

KINDS = {
    "vllm": Completions(VLLM, "vllm", _able({}, structural_tags=JSON_TAGS), _RETURN_IDS, takes_ends=True),
    "dynamo": Completions(
        Software("dynamo"),
        "nvidia",
        _able(
            {
                "logit_bias": "Dynamo silently drops it",
                "bad_sequences": "Dynamo refuses bad_words",
                "allowed_token_ids": "Dynamo drops it",
                "cache_salt": "older releases of Dynamo drop it",
            },
            limits={"top_logprobs": 5},
        ),
        {"nvext": {"extra_fields": ["completion_token_ids"]}},
        guided=True,
    ),
    "lmi": Completions(
        Software("lmi"),
        "lmi-handler",
        _able(
            {"top_logprobs": "the server does not return ids of alternatives"},
            label_reason=(
                "a server of the kind lmi returns no ids of alternatives; send decisions to that server itself"
            ),
        ),
        _RETURN_IDS,
        ranked=False,
    ),
}
