"""Defines the parameters that llama-server supports, and builds the body of a request to /completion.

Sources: llama.cpp b11434, tools/server/server-schema.cpp (fields of a request), common/sampling.cpp (order of the
samplers) and common/json-schema.cpp (keywords of a schema).
"""

from __future__ import annotations

import functools
import json
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from handler.core.errors import ConfigError, Problem
from handler.core.media import MEDIA
from handler.core.values import Sampling, StructuredOutput, Task
from handler.engines.base import Capabilities, EngineConfig, Rule, arguments, drawn_or, unless_neutral
from handler.engines.llamacpp.gbnf import read
from handler.engines.llamacpp.schema import schema_grammar
from handler.engines.structured_output.nodes import choice_of
from handler.engines.structured_output.references import with_plain_references
from handler.engines.structured_output.regex import regex_grammar

_ALLOWED = 1000.0
"""Added to the logits of the only tokens that are allowed. It exceeds all differences between logits by far, and is
small enough for 32-bit floats to keep the differences between the allowed tokens to 1e-4."""

_LONG_PROMPT = 256
"""Number of tokens from which llama-server reports the progress of a prompt. Otherwise, it is silent meanwhile."""

_RANDOM_SEED = 0xFFFFFFFF  # the seed for which llama-server chooses one itself
_SAMPLERS = ("penalties", "temperature", "top_k", "top_p", "min_p", "typ_p")
"""The order of transformers. llama.cpp applies the temperature last by default, and other samplers before it."""

_CONFLICT = (
    "presence_penalty and frequency_penalty cannot be combined with repetition_penalty on llama-server; "
    "send repetition_penalty=1, or omit them"
)

_MAX_COUNTED = 1000.0
"""Maximum of a penalty for a token of the prompt that llama-server may apply and a bias may take back. 32-bit floats
then keep the logit to 1e-4."""

_REASONS = {
    "num_beams": "llama-server has no beam search",
    "no_repeat_ngram_size": "repeated n-grams cannot be forbidden",
    "bad_sequences": "llama-server forbids only single tokens",
    "prompt_logprobs": "llama-server returns no log-probabilities of the prompt",
    "return_context_logits": "llama-server returns no logits",
    "return_generation_logits": "llama-server returns no logits",
    "cache_salt": "llama-server has one prompt cache for all requests",
}
"""Maps each Sampling field that llama-server does not support to the reason."""

_RESPONSE_FIELDS = (
    "stop", "stop_type", "truncated", "tokens", "tokens_predicted", "completion_probabilities", "timings",
    "tokens_evaluated",
)  # fmt: skip
"""The fields of a response's last event. By default it also repeats the whole prompt."""

_FIXED = {
    "return_tokens": True,
    "cache_prompt": True,
    "response_fields": _RESPONSE_FIELDS,
    "samplers": _SAMPLERS,
    "min_keep": 0,
    "mirostat": 0,
    "dynatemp_range": 0.0,
    "n_indent": 0,
    "t_max_predict_ms": -1,
    "reasoning_budget_tokens": -1,
    "backend_sampling": False,
    "post_sampling_probs": False,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "n_cache_reuse": 0,
    "stop": ["\ufdd0" + secrets.token_hex(16)],
}
"""Fields of every request. The neutral values are included because the server's flags may set others. The only neutral
stop string is one that no response contains: the server replaces an empty list with its own."""


class Leg(NamedTuple):
    """A completion that computes a response, or a part of it.

    Attributes:
        prompt: ids of the prompt, and of the response so far.
        max_tokens: maximum number of tokens.
        number: number of earlier completions that drew tokens of the response.
        streamed: whether the response arrives token by token.
        without_end: whether tokens that end the response are forbidden.
        bias: numbers to add to the logits of token ids.
        frequency_penalty: penalty for each time that a token is in `prompt` or in the response.
    """

    prompt: Sequence[int]
    max_tokens: int
    number: int = 0
    streamed: bool = True
    without_end: bool = False
    bias: Mapping[int, float] = MappingProxyType({})
    frequency_penalty: float = 0.0


class Penalties(NamedTuple):
    """The presence and frequency penalties of a request. They apply to the tokens of the response only.

    llama-server also counts the prompt. For the frequency penalty, a bias takes that back exactly, because the penalty
    is proportional to the count. The presence penalty is not, so each completion then computes a single token, and all
    penalties are biases.

    Attributes:
        counts: how often each token is in the prompt, if there is a frequency penalty.
        single: whether each completion computes a single token.
    """

    presence: float
    frequency: float
    counts: Mapping[int, int]
    single: bool

    @classmethod
    def of(cls, sampling: Sampling, prompt: Sequence[int]) -> Penalties:
        """Return the penalties of a request.

        Args:
            prompt: ids of the prompt.

        Raises:
            ValueError: llama-server does not support them together with another parameter.
        """
        presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
        counts = Counter(prompt if frequency else ())
        single = bool(presence) or max(counts.values(), default=0) * abs(frequency) > _MAX_COUNTED
        if (presence or frequency) and sampling.repetition_penalty != 1:
            raise ValueError(_CONFLICT)
        if single and sampling.structured_output is not None:
            raise ValueError("presence_penalty cannot be combined with structured output on llama-server")
        return cls(presence, frequency, counts, single)

    def added_to(self, leg: Leg, response: Sequence[int]) -> Leg:
        """Return a leg with the penalties after the part of the response that has been computed."""
        if not self.single:
            bias = {id: count * self.frequency for id, count in self.counts.items()}
            return leg._replace(bias=bias, frequency_penalty=self.frequency)
        bias = {id: -count * self.frequency - self.presence for id, count in Counter(response).items()}
        return leg._replace(bias=bias, max_tokens=min(leg.max_tokens, 1))


def completion(sampling: Sampling, leg: Leg, context: int) -> dict[str, Any]:
    """Return the body for /completion.

    Args:
        context: maximum number of tokens of a prompt and its response, which the repetition penalty considers.

    Raises:
        ValueError: llama-server does not support a value in `sampling`; the exception says why.
    """
    if sampling.allowed_token_ids and sampling.repetition_penalty != 1.0:
        raise ValueError("allowed_token_ids cannot be combined with repetition_penalty on llama-server")
    beside = {"prompt": list(leg.prompt), "n_predict": leg.max_tokens, "stream": leg.streamed, "repeat_last_n": context}
    progress = {"return_progress": True} if len(leg.prompt) >= _LONG_PROMPT else {}
    return {**_FIXED, **beside, **progress, **arguments(_TABLE, sampling, leg)}


GRAMMAR = "generation_settings/grammar"
"""The field of a response with the grammar that applied to it."""

SETTINGS: Mapping[str, Any] = {
    **_FIXED,
    **{"prompt": [0], "n_predict": 1, "stream": False, "cache_prompt": False},
    "response_fields": (GRAMMAR,),
}
"""The body for /completion that gets the grammar that applies to requests without one."""


def scores(prompt: Sequence[int], count: int) -> dict[str, Any]:
    """Return the body for /completion that gets the log-probabilities of the most likely tokens after a prompt.

    llama-server reports none if the token that it chooses leaves a character incomplete, so the grammar forbids that.
    The log-probabilities are computed before the grammar applies.
    """
    beside = {"prompt": list(prompt), "n_predict": 1, "stream": False, "n_probs": count, "logit_bias": []}
    return {**_FIXED, **beside, "temperature": 0.0, "top_k": 1, "grammar": "root ::= [ -~]+", "ignore_eos": False}


def _top_k(sampling: Sampling, *more: Any) -> dict[str, Any]:
    if sampling.top_p == 0:  # the smallest nucleus is one token
        return {"top_k": 1, "top_p": 1.0}
    return {"top_k": sampling.top_k, "top_p": sampling.top_p}


_GREEDY = {
    "temperature": 0.0,
    "top_k": 1,
    "samplers": ("penalties", "top_k"),
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
}
"""The values for greedy responses. Each further sampler would read the whole vocabulary for each token."""

_DRAWN: Mapping[str, Rule] = {
    "temperature": lambda sampling: {"temperature": sampling.temperature, "samplers": _SAMPLERS},
    "top_k": _top_k,
    "top_p": _top_k,
    "min_p": "min_p",
    "typical_p": "typical_p",
}
"""Rules for the fields that matter only when sampling."""


def _seed(sampling: Sampling, leg: Leg) -> dict[str, Any]:
    """Return a seed of 32 bits. The parts of a response must not use the same random numbers."""
    if sampling.seed is None:
        return {"seed": _RANDOM_SEED}
    return {"seed": (sampling.seed + leg.number) % _RANDOM_SEED}


def _bias(sampling: Sampling, leg: Leg) -> dict[str, Any]:
    """Return the biases. llama-server adds those for `ignore_eos` itself."""
    bias: dict[int, Any] = dict(sampling.logit_bias)
    for id, value in (*leg.bias.items(), *((id, _ALLOWED) for id in sampling.allowed_token_ids)):
        bias[id] = bias.get(id, 0.0) + value
    bias |= dict.fromkeys(sampling.bad_token_ids, False)
    if leg.without_end:
        bias |= dict.fromkeys(sampling.stop_token_ids, False)
    return {"logit_bias": [[id, value] for id, value in bias.items()]}


def _ends(sampling: Sampling, leg: Leg) -> dict[str, Any]:
    return {"ignore_eos": sampling.ignore_eos or leg.without_end}


def _logprobs(sampling: Sampling, leg: Leg) -> dict[str, Any]:
    scored = sampling.logprobs or sampling.top_logprobs
    return {"n_probs": max(sampling.top_logprobs, 1) if scored else 0}


def _rule(sampling: Sampling, leg: Leg) -> Mapping[str, Any]:
    rule = sampling.structured_output
    return {} if rule is None else grammar(rule)


@functools.lru_cache(maxsize=64)
def grammar(rule: StructuredOutput) -> Mapping[str, Any]:
    """Return the field for structured output: a JSON schema, or a grammar in GBNF.

    Raises:
        ValueError: llama-server does not support the schema, regular expression or grammar.
    """
    match rule.kind:
        case "json_object":
            return {"json_schema": {"type": "object"}}
        case "json_schema":
            schema = with_plain_references(json.loads(rule.value))
            written = schema_grammar(schema)
            return _gbnf(written.text) if written.unenforced else {"json_schema": schema}
        case "regex":
            return _gbnf(f"root ::= {regex_grammar(rule.value)}")
        case "choice":
            return _gbnf(f"root ::= {choice_of(json.loads(rule.value))}")
        case "grammar":
            return _gbnf(rule.value)
    raise ValueError(f"llama-server does not support structured output of the kind {rule.kind}")


def _gbnf(text: str) -> dict[str, Any]:
    read(text)  # refuses what would crash llama-server, or what it would refuse without a reason
    return {"grammar": text}


_TABLE: Mapping[str, Rule] = {
    "max_new_tokens": lambda sampling, leg: {},  # `Leg.max_tokens`
    "min_new_tokens": lambda sampling, leg: {},  # `Leg.without_end`
    "do_sample": drawn_or(_GREEDY, _DRAWN),
    "seed": _seed,
    "repetition_penalty": unless_neutral("repetition_penalty", "repeat_penalty"),
    "presence_penalty": lambda sampling, leg: {},  # `Leg.bias`
    "frequency_penalty": lambda sampling, leg: {"frequency_penalty": leg.frequency_penalty},
    "logit_bias": _bias,
    "bad_token_ids": _bias,
    "allowed_token_ids": _bias,
    "stop_token_ids": _bias,  # the engine ends the response itself
    "ignore_eos": _ends,
    "logprobs": _logprobs,
    "top_logprobs": _logprobs,
    "structured_output": _rule,
}

CAPABILITIES = Capabilities(
    frozenset({*_TABLE, *_DRAWN}),
    _REASONS,
    no_adapters="adapters are loaded by the server at option.base_url",
    no_media=dict.fromkeys(MEDIA, "the server at option.base_url receives only tokens"),
)


_POOLINGS = ("cls", "last", "mean")
"""Values of option.pooling that llama-server supports."""


def check_pooling(config: EngineConfig) -> None:
    """Raise ConfigError if llama-server does not support the model's task, or the value of option.pooling."""
    if config.task is Task.CLASSIFICATION:
        key = f"option.task={config.options.task}"
        message = f"{key}: the model is for {config.task.value}, but llama-server returns only one score per text"
        raise ConfigError(Problem("", "option.task", message))
    pooling = config.options.pooling
    if config.task is Task.GENERATION or pooling == "auto":
        return
    if config.task is not Task.EMBEDDING:
        reason = "it applies only to embeddings; omit the option"
    elif pooling not in _POOLINGS:
        reason = f"llama-server supports {', '.join(_POOLINGS)}"
    elif "base_url" in config.engine_options:
        reason = f"omit the option, and start llama-server with `--pooling {pooling}`"
    else:
        return
    raise ConfigError(Problem("", "option.pooling", f"option.pooling={pooling}: {reason}"))
