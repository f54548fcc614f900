"""vLLM's contract: vllm_engine.proto, as implemented by smg-grpc-servicer 0.14 (smg_grpc_servicer/vllm/servicer.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from handler.core.values import Sampling
from handler.engines.base import COMMON_RULES, Rule, drawn_or, drawn_rules, logprob_rules, unless_neutral
from handler.engines.grpc.contract import NO_FIELD, Contract
from handler.engines.remote.servers import VLLM, structured_output_of

_MOST_TOPS = 19  # vLLM's limit is 20, which includes the chosen token


def _folded(seed: int) -> int:
    """Fold a 64-bit seed into the 31 bits that the contract allows."""
    return (seed ^ seed >> 31 ^ seed >> 62) & 0x7FFFFFFF


def _with_chosen(num_tops: int) -> int:
    """Add 1 to the number of alternatives unless it is 0, as the server puts the chosen token before them."""
    return num_tops and num_tops + 1


def _guide(sampling: Sampling) -> dict[str, Any]:
    """Return the fields for structured output, which applies from the first token.

    With --reasoning-parser, servicer 0.14.1 applies it only after the reasoning.
    """
    rule = structured_output_of(sampling)
    if rule is None:
        return {}
    value: Any = rule.value
    if rule.kind in ("json_object", "choice"):
        value = True if rule.kind == "json_object" else {"choices": json.loads(value)}
    return {rule.kind: value, "grammar_from_first_token": True}


_DRAWN: Mapping[str, Rule] = {**drawn_rules(), "seed": unless_neutral("seed", make=_folded)}
"""Rules for the fields that matter only when sampling."""

_TABLE: Mapping[str, Rule] = {
    **COMMON_RULES,
    "max_new_tokens": lambda sampling: {"max_tokens": max(sampling.max_new_tokens, 1)},
    "min_new_tokens": "min_tokens",
    "do_sample": drawn_or({"temperature": 0.0, "top_p": 1.0}, _DRAWN),
    **logprob_rules(_with_chosen),
    "logit_bias": unless_neutral("logit_bias", make=dict),
    "structured_output": _guide,
}


class VllmContract(Contract):
    software = VLLM
    module = "vllm_engine"
    service = "VllmEngine"
    table = _TABLE
    no_adapters = "vLLM's gRPC contract has no field for an adapter"
    no_media = "vLLM's gRPC API accepts only preprocessed pixels, or URLs that its server fetches"
    command = ("vllm.entrypoints.grpc_server", "--model")
    context_flag = "--max-model-len"
    supports = frozenset({*_TABLE, *_DRAWN})
    reasons: ClassVar[Mapping[str, str]] = {
        "no_repeat_ngram_size": "repeated n-grams cannot be forbidden",
        "bad_sequences": NO_FIELD,
        "bad_token_ids": f"{NO_FIELD}; a bias of -100 has nearly the same effect",
    }
    limits: ClassVar[Mapping[str, float]] = {"top_logprobs": _MOST_TOPS, "prompt_top_logprobs": _MOST_TOPS}

    def embedding_flags(self, mode: str) -> Sequence[str]:
        pooler = {"seq_pooling_type": mode.upper(), "use_activation": False}  # this handler normalizes
        return "--runner", "pooling", "--pooler-config", json.dumps(pooler)

    def abort(self, id: str) -> Any:
        return self.messages.AbortRequest(request_ids=[id])


KINDS = {"vllm": VllmContract()}
