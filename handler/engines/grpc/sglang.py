"""SGLang's contract: sglang_scheduler.proto as smg-grpc-servicer serves it (smg_grpc_servicer/sglang, 0.14)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from handler.core.values import Sampling
from handler.engines.base import Rule, arguments, unless_neutral
from handler.engines.grpc.contract import NO_FIELD, Contract, News

_FORBIDDEN = -1e9  # added to the logit of a token that must not come
_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}]")


def _choice(sampling: Sampling) -> dict[str, Any]:
    neutral = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
    drawn = sampling.do_sample and sampling.temperature > 0
    return neutral | (arguments(_DRAWN, sampling) if drawn else {})


def _top(sampling: Sampling) -> dict[str, Any]:
    if sampling.top_p == 0:  # the smallest nucleus is one token
        return {"top_k": 1, "top_p": 1.0}
    return {"top_k": sampling.top_k or -1, "top_p": sampling.top_p}


def _bias(sampling: Sampling) -> dict[str, Any]:
    bias = dict(sampling.logit_bias) | dict.fromkeys(sampling.bad_token_ids, _FORBIDDEN)
    return {"logit_bias": {str(id): value for id, value in bias.items()}} if bias else {}


def either(choices: str) -> str:
    """Return the regular expression of a JSON list of texts."""
    return "|".join(_SPECIAL.sub(r"\\\g<0>", choice) for choice in json.loads(choices))


def _guide(sampling: Sampling) -> dict[str, Any]:
    rule = sampling.structured_output
    if rule is None:
        return {}
    match rule.kind:
        case "json_object":
            return {"json_schema": '{"type": "object"}'}
        case "choice":
            return {"regex": either(rule.value)}
        case "grammar":
            return {"ebnf_grammar": rule.value}
        case kind:
            return {kind: rule.value}


_DRAWN: Mapping[str, Rule] = {"temperature": "temperature", "top_k": _top, "top_p": _top, "min_p": "min_p"}
"""Fields that count where tokens are drawn."""

_TABLE: Mapping[str, Rule] = {
    "max_new_tokens": lambda sampling: {"max_new_tokens": max(sampling.max_new_tokens, 1)},
    "min_new_tokens": "min_new_tokens",
    "do_sample": _choice,
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "ignore_eos": "ignore_eos",
    "stop_token_ids": unless_neutral("stop_token_ids", make=list),
    "logit_bias": _bias,
    "bad_token_ids": _bias,
    "structured_output": _guide,
}

_OF_THE_REQUEST = frozenset({"logprobs", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs"})
"""Fields that are not of SGLang's sampling parameters, but beside them."""


class Sglang(Contract):
    name = "sglang"
    module = "sglang_scheduler"
    service = "SglangScheduler"
    supports = frozenset({*_TABLE, *_DRAWN, *_OF_THE_REQUEST})
    reasons: ClassVar[Mapping[str, str]] = {
        "seed": NO_FIELD,
        "no_repeat_ngram_size": "repeated n-grams cannot be forbidden",
        "bad_sequences": NO_FIELD,
    }

    def request(self, id: str, ids: Sequence[int], sampling: Sampling) -> Any:
        tops = max(sampling.top_logprobs, sampling.prompt_top_logprobs if sampling.prompt_logprobs else 0)
        return self.messages.GenerateRequest(
            request_id=id,
            tokenized=self.messages.TokenizedInput(input_ids=ids),
            sampling_params=self.messages.SamplingParams(n=1, **arguments(_TABLE, sampling)),
            return_logprob=bool(sampling.logprobs or sampling.prompt_logprobs or tops),
            logprob_start_len=0 if sampling.prompt_logprobs else -1,
            top_logprobs_num=tops,
            stream=True,
        )

    def abort(self, id: str) -> Any:
        return self.messages.AbortRequest(request_id=id, reason="the client left")

    def news(self, response: Any, num_tops: int, num_prompt_tops: int) -> News:
        return super().news(response, num_tops, num_prompt_tops)._replace(request_id=response.request_id)
