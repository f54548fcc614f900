"""SGLang's contract: sglang_scheduler.proto, as implemented by smg-grpc-servicer 0.14 (smg_grpc_servicer/sglang)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from handler.core.values import Sampling
from handler.engines.base import COMMON_RULES, Rule, drawn_or, drawn_rules, regex_of
from handler.engines.grpc.contract import NO_FIELD, Contract

_FORBIDDEN = -1e9  # added to the logit of a forbidden token


def _bias(sampling: Sampling) -> dict[str, Any]:
    bias = dict(sampling.logit_bias) | dict.fromkeys(sampling.bad_token_ids, _FORBIDDEN)
    return {"logit_bias": {str(id): value for id, value in bias.items()}} if bias else {}


def _guide(sampling: Sampling) -> dict[str, Any]:
    rule = sampling.structured_output
    if rule is None:
        return {}
    match rule.kind:
        case "json_object":
            return {"json_schema": '{"type": "object"}'}
        case "choice":
            return {"regex": regex_of(rule.value)}
        case "grammar":
            return {"ebnf_grammar": rule.value}
        case kind:
            return {kind: rule.value}


_DRAWN = drawn_rules(no_top_k=-1)
"""Rules for the fields that matter only when sampling."""

_TABLE: Mapping[str, Rule] = {
    **COMMON_RULES,
    "max_new_tokens": lambda sampling: {"max_new_tokens": max(sampling.max_new_tokens, 1)},
    "min_new_tokens": "min_new_tokens",
    "do_sample": drawn_or({"temperature": 0.0, "top_p": 1.0, "top_k": -1}, _DRAWN),
    "logit_bias": _bias,
    "bad_token_ids": _bias,
    "structured_output": _guide,
}

_OF_THE_REQUEST = frozenset({"logprobs", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs"})
"""Fields that are set in the request itself, not in SGLang's sampling parameters."""


class SglangContract(Contract):
    name = "sglang"
    module = "sglang_scheduler"
    service = "SglangScheduler"
    table = _TABLE
    no_adapters = "SGLang's gRPC server (smg-grpc-servicer 0.14) does not load adapters"
    no_media = "SGLang's gRPC API accepts only preprocessed pixels"
    command = ("sglang.launch_server", "--grpc-mode", "--model-path")
    context_flag = "--context-length"
    pools = frozenset({"cls", "last"})  # SGLang's models choose the mode, and none uses the mean (models/bert.py, 2026)
    supports = frozenset({*_TABLE, *_DRAWN, *_OF_THE_REQUEST})
    reasons: ClassVar[Mapping[str, str]] = {
        "seed": NO_FIELD,
        "no_repeat_ngram_size": "repeated n-grams cannot be forbidden",
        "bad_sequences": NO_FIELD,
    }

    def beside(self, sampling: Sampling) -> dict[str, Any]:
        tops = max(sampling.top_logprobs, sampling.prompt_top_logprobs if sampling.prompt_logprobs else 0)
        return {
            "return_logprob": bool(sampling.logprobs or sampling.prompt_logprobs or tops),
            "logprob_start_len": 0 if sampling.prompt_logprobs else -1,
            "top_logprobs_num": tops,
        }

    def embed(self, id: str, ids: Sequence[int]) -> Any:
        message = super().embed(id, ids)
        message.token_type_ids.extend([0] * len(ids))  # encoder models fail without them
        return message

    def embedding_flags(self, mode: str) -> Sequence[str]:
        return ("--is-embedding",)
