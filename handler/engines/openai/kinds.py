"""Kinds of servers: what each supports, and the body of a request to it.

Sources: vLLM's `CompletionRequest` (vllm/entrypoints/openai/completion/protocol.py, 0.33); Dynamo's
`NvCreateCompletionRequest` (lib/llm/src/protocols/openai, 1.6), and what its front end was seen to do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.values import Sampling, StructuredOutput
from handler.engines.base import Capabilities

_MOST_BIAS = 100.0
"""vLLM moves a larger one to this limit without a word."""

_UNSUPPORTED = {
    "num_beams": "there is no beam search in a stream",
    "typical_p": "there is no typical decoding",
    "no_repeat_ngram_size": "repeated n-grams cannot be forbidden",
    "bad_token_ids": "ids cannot be forbidden; a bias of -100 nearly does so",
    "prompt_logprobs": "a stream has no log-probabilities of the prompt",
    "return_context_logits": "there are no logits",
    "return_generation_logits": "there are no logits",
}
"""Fields of Sampling that no server has, with the reason."""


class Kind(NamedTuple):
    """One kind of server.

    Attributes:
        owner: the beginning of its models' `owned_by`; vLLM's Rust front end has `vllm-frontend-rs`.
        unsupported: the fields of Sampling that it lacks or drops, with the reason.
        limits: as in `Capabilities`.
        ask: fields of a request that have it return token ids.
        ranked: its log-probabilities name tokens by their ids.
    """

    owner: str
    unsupported: Mapping[str, str]
    limits: Mapping[str, float]
    ask: Mapping[str, Any]
    ranked: bool = True

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            {**_UNSUPPORTED, **self.unsupported},
            limits={"temperature": 2.0, **self.limits},
            no_adapters="its adapters are loaded at option.base_url, and are models there",
            no_images="the server at option.base_url gets tokens only",
        )


KINDS = {
    "vllm": Kind("vllm", {}, {}, {"return_token_ids": True}),
    "dynamo": Kind(
        "nvidia",
        {
            "logit_bias": "Dynamo drops it without a word",
            "bad_sequences": "Dynamo refuses bad_words",
        },
        {"top_logprobs": 5},
        {"nvext": {"extra_fields": ["completion_token_ids"]}},
    ),
    "lmi": Kind(
        "lmi-handler",
        {"top_logprobs": "the alternatives to a token have no ids there"},
        {},
        {"return_token_ids": True},
        ranked=False,
    ),
}
"""By the value of option.base_url_kind."""


def completion(kind: str, model: str, ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
    """Make the body of /v1/completions; it names every neutral value, as the server may have defaults of its own.

    Raises:
        ValueError: the server would not do what `sampling` says; the message says why.
    """
    known = KINDS[kind]
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(ids),
        "stream": True,
        "n": 1,
        "max_tokens": max(sampling.max_new_tokens, 1),
        "min_tokens": sampling.min_new_tokens,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "ignore_eos": sampling.ignore_eos,
        **known.ask,
    }
    if sampling.do_sample and sampling.temperature > 0:
        body |= {
            "temperature": sampling.temperature,
            "top_k": 1 if sampling.top_p == 0 else sampling.top_k or -1,  # the smallest nucleus is one token
            "top_p": sampling.top_p or 1.0,
            "min_p": sampling.min_p,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.signed_seed
    if sampling.logprobs or sampling.top_logprobs:
        body["logprobs"] = sampling.top_logprobs  # 0: the chosen token's alone
        if known.ranked:
            body["return_tokens_as_token_ids"] = True
    if sampling.stop_token_ids:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.bad_sequences:
        body["bad_words"] = list(sampling.bad_sequences)
    if sampling.logit_bias:
        if any(abs(bias) > _MOST_BIAS for _, bias in sampling.logit_bias):
            raise ValueError(f"logit_bias: the server takes -{_MOST_BIAS:g} to {_MOST_BIAS:g}")
        body["logit_bias"] = {str(id): bias for id, bias in sampling.logit_bias}
    if sampling.structured_output is not None:
        body |= _guide(kind, sampling.structured_output)
    return body


def _guide(kind: str, rule: StructuredOutput) -> dict[str, Any]:
    """Ask for structured output: by `structured_outputs`, or for Dynamo by vLLM's older names."""
    name = {"json_schema": "json"}.get(rule.kind, rule.kind)
    value: Any = rule.value
    if rule.kind in ("json_schema", "choice"):
        value = json.loads(rule.value)
    if kind != "dynamo":
        return {"structured_outputs": {name: True if rule.kind == "json_object" else value}}
    if rule.kind == "json_object":
        return {"guided_json": {"type": "object"}}
    return {f"guided_{name}": value}
