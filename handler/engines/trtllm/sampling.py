"""Translates Sampling into the arguments of TensorRT-LLM's SamplingParams (tensorrt_llm/sampling_params.py)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from handler.core.values import Sampling, StructuredOutput
from handler.engines.base import (
    PENALTIES,
    EngineConfig,
    Rule,
    StructuredOutputCheck,
    arguments,
    drawn_seed,
    passed_otherwise,
    regex_of,
    unless_neutral,
)
from handler.engines.structured_output.ebnf import acyclic

_MAX_SEED = (1 << 64) - 1

# Limits that keep a request from crashing the engine: a NaN, or a `top_k` above the vocabulary's size, fails a
# device-side assertion.
_COLDEST = 1e-5  # lower temperatures are treated as greedy, because logits divided by them may be infinite
_FORBIDDEN = -1e30  # bias of forbidden tokens; minus infinity could result in NaN


@dataclass(frozen=True)
class ModelProperties:
    """Properties of the loaded model that affect requests."""

    vocabulary: int  # number of ids
    eos: frozenset[int]
    tokenizer_eos: int | None  # the tokenizer's end token, which is also in `eos`
    torch_sampler: bool  # whether TorchSampler is used; TRTLLMSampler returns log-probabilities only for beams

    @property
    def end_id(self) -> int:
        """The only end token that TensorRT-LLM's `min_tokens` suppresses, or -1 if there is none."""
        return min(self.eos, default=-1) if self.tokenizer_eos is None else self.tokenizer_eos


def misses_stops(sampling: Sampling, model: ModelProperties) -> bool:
    """Return whether the handler must look for stop ids itself.

    The engine's `min_tokens` suppresses only `end_id`, and the engine's `ignore_eos` drops all stop ids.
    """
    return bool(sampling.min_new_tokens and stops(sampling, model)) or (sampling.ignore_eos and _by_tokenizer(sampling))


def stops(sampling: Sampling, model: ModelProperties) -> frozenset[int]:
    """Return the ids that end a response, except `end_id`."""
    eos = frozenset() if sampling.ignore_eos else model.eos
    return eos - {model.end_id} | frozenset(sampling.stop_token_ids)


def _by_tokenizer(sampling: Sampling) -> bool:
    return bool(sampling.bad_sequences)


def _ends(sampling: Sampling, model: ModelProperties) -> dict[str, Any]:
    """Return the arguments for end tokens and forbidden token sequences.

    If `end_id` is set, TensorRT-LLM adds no stop ids of its own, and -1 means no end token. TensorRT-LLM encodes
    forbidden words only if `end_id` is not set. A beam search ends beams with `end_id`. A client's own end token is the
    last item of `stop_token_ids`.
    """
    arguments: dict[str, Any] = {}
    ids = frozenset() if misses_stops(sampling, model) else stops(sampling, model)
    end = -1 if sampling.ignore_eos else model.end_id
    if sampling.ignore_eos and sampling.num_beams > 1 and ids:
        end = sampling.stop_token_ids[-1]
        ids -= {end}
    if _by_tokenizer(sampling):
        arguments |= {"bad": list(sampling.bad_sequences), "ignore_eos": sampling.ignore_eos}
    else:
        arguments |= {"end_id": end, "pad_id": max(model.end_id, 0)}
    if ids:
        arguments["stop_token_ids"] = sorted(ids)
    if sampling.min_new_tokens and not sampling.ignore_eos:  # without end_id, it would suppress the id -1
        arguments["min_tokens"] = sampling.min_new_tokens
    return arguments


def _choice(sampling: Sampling, model: ModelProperties) -> dict[str, Any]:
    """Return the arguments for greedy decoding, sampling or beam search.

    Version 1.0 samples only if temperature, top_k and top_p are all set.
    """
    if sampling.num_beams > 1:
        return {
            "use_beam_search": True,
            "n": sampling.num_beams,
            "best_of": sampling.num_beams,
            "length_penalty": sampling.length_penalty,
            "early_stopping": int(sampling.early_stopping),
        }
    if not sampling.do_sample or sampling.temperature < _COLDEST or sampling.top_p == 0 or sampling.top_k == 1:
        return {"top_k": 1}
    return arguments(_DRAWN, sampling, model)


def _top_k(sampling: Sampling, model: ModelProperties) -> dict[str, Any]:
    return {"top_k": sampling.top_k if sampling.top_k < model.vocabulary else 0}  # 0 allows all tokens


def _logprobs(sampling: Sampling, model: ModelProperties) -> dict[str, Any]:
    if (model.torch_sampler and (sampling.logprobs or sampling.top_logprobs)) or sampling.num_beams > 1:
        return {"logprobs": max(1, sampling.top_logprobs)}  # for 0, no log-probabilities are returned
    return {}


def _context_logits(sampling: Sampling, model: ModelProperties) -> dict[str, Any]:
    """Request the prompt's logits, from which the handler computes log-probabilities.

    Before 1.3, `prompt_logprobs` returns only the most likely tokens, not the prompt's own (NVIDIA/TensorRT-LLM pull
    request 11235).
    """
    return {"return_context_logits": True} if sampling.prompt_logprobs or sampling.return_context_logits else {}


def _forbidden(sampling: Sampling, model: ModelProperties) -> dict[str, Any]:
    """Return the forbidden ids. TorchSampler ignores them, so `_bias` adds a large negative bias to them instead."""
    if model.torch_sampler or not sampling.bad_token_ids:
        return {}
    return {"bad_token_ids": list(sampling.bad_token_ids)}


def _bias(sampling: Sampling, model: ModelProperties) -> dict[str, Any]:
    """Return the biases to add to the logits: a float32 numpy array [vocabulary]."""
    changes = dict(sampling.logit_bias)
    if model.torch_sampler:
        changes |= dict.fromkeys(sampling.bad_token_ids, _FORBIDDEN)
    if not changes:
        return {}
    import numpy

    bias = numpy.zeros(model.vocabulary, dtype=numpy.float32)
    bias[list(changes)] = list(changes.values())
    return {"embedding_bias": bias}


def guided_decoding_arguments(structured_output: StructuredOutput) -> dict[str, Any]:
    """Return the arguments of GuidedDecodingParams.

    Raises:
        ValueError: this kind of structured output is not supported by TensorRT-LLM.
    """
    match structured_output.kind:
        case "json_schema":
            return {"json": structured_output.value}
        case "json_object":
            return {"json_object": True}
        case "regex" | "grammar" | "structural_tag" as kind:
            return {kind: structured_output.value}
        case "choice":  # as a regular expression, because choices are not supported
            return {"regex": f"({regex_of(structured_output.value)})"}
    raise ValueError(f"TensorRT-LLM does not support structured output of the kind {structured_output.kind!r}")


_DRAWN: Mapping[str, Rule] = {
    "temperature": "temperature",
    "top_k": _top_k,
    "top_p": "top_p",
    # With the default seed, equal requests would get equal responses (NVIDIA/TensorRT-LLM issues 1000 and 19487).
    "seed": drawn_seed,
    "min_p": unless_neutral("min_p"),
}
"""Rules for the fields that matter only when sampling."""

_TABLE: Mapping[str, Rule] = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": _ends,
    "ignore_eos": _ends,
    "stop_token_ids": _ends,
    "bad_sequences": _ends,
    "bad_token_ids": _forbidden,
    "logit_bias": _bias,
    "do_sample": _choice,
    "num_beams": _choice,
    "length_penalty": _choice,
    "early_stopping": _choice,
    **PENALTIES,
    "logprobs": _logprobs,
    "top_logprobs": _logprobs,
    "prompt_logprobs": _context_logits,
    "prompt_top_logprobs": _context_logits,
    "return_context_logits": _context_logits,
    "return_generation_logits": unless_neutral("return_generation_logits"),
    "structured_output": unless_neutral("structured_output", "guided_decoding", guided_decoding_arguments),
    "cache_salt": passed_otherwise,  # `engine.py` passes it beside the parameters
}

SUPPORTS = frozenset({*_TABLE, *_DRAWN})


def sampling_arguments(sampling: Sampling, model: ModelProperties) -> dict[str, Any]:
    """Return the arguments of SamplingParams. For `guided_decoding`, they contain a dict for GuidedDecodingParams.

    Raises:
        ValueError: the engine would refuse a value, or would fail because of the value after the request was submitted.
    """
    _check(sampling, model)
    return {
        # The engine need not decode ids, because the handler does it and looks for stop strings.
        "detokenize": False,
        # Otherwise the id that ends the response is removed from token_ids, but not from logprobs.
        "include_stop_str_in_output": True,
        **arguments(_TABLE, sampling, model),
    }


def _check(sampling: Sampling, model: ModelProperties) -> None:
    """Raise ValueError for values that TensorRT-LLM would reject later, in C++ and without naming the parameter."""
    _require(sampling.max_new_tokens >= 1, "max_new_tokens must be at least 1")
    _require(sampling.min_new_tokens >= 0, "min_new_tokens must be at least 0")
    _require(0 <= sampling.temperature < math.inf, "temperature must be a finite number of at least 0")
    _require(sampling.top_k >= 0, "top_k must be at least 0")
    _require(0 <= sampling.top_p <= 1, "top_p must be from 0 to 1")
    _require(0 <= sampling.min_p <= 1, "min_p must be from 0 to 1")
    _require(0 < sampling.repetition_penalty < math.inf, "repetition_penalty must be a finite number above 0")
    _require(math.isfinite(sampling.presence_penalty), "presence_penalty must be a finite number")
    _require(math.isfinite(sampling.frequency_penalty), "frequency_penalty must be a finite number")
    _require(sampling.no_repeat_ngram_size >= 0, "no_repeat_ngram_size must be at least 0")
    _require(0 <= (sampling.seed or 0) <= _MAX_SEED, "seed must be from 0 to 2^64 - 1")
    ids = {*sampling.bad_token_ids, *(id for id, _ in sampling.logit_bias)}
    _require(all(0 <= id < model.vocabulary for id in ids), f"token ids must be from 0 to {model.vocabulary - 1}")
    if sampling.num_beams > 1:
        needed = "length_penalty must be a finite number of at least 0 with TensorRT-LLM"
        _require(0 <= sampling.length_penalty < math.inf, needed)
    if sampling.structured_output is not None:
        _require(not sampling.ignore_eos, "structured output cannot be combined with ignore_eos")
        _require(not sampling.min_new_tokens, "structured output cannot be combined with a minimum length")
    if _by_tokenizer(sampling) and sampling.ignore_eos:
        # TensorRT-LLM would add the model's other end tokens to the stop ids.
        _require(len(model.eos) < 2, "bad_sequences cannot be combined with ignore_eos: there are several end tokens")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


# -- check a client's structured output before TensorRT-LLM gets it ----------------------------------------------------
# TensorRT-LLM computes a mask of allowed tokens at every step, while all requests wait. With its backend xgrammar, each
# schema or grammar is tried with the installed xgrammar in the sandbox. The backend llguidance limits its own work,
# except parsing. So only the syntax of regular expressions is checked, and whether a rule of a grammar is cyclic.

_CLASS = re.compile(r"\\[pP]\{[^}]*\}")  # Unicode classes, which the engine supports but Python does not


def check(structured_output: StructuredOutput) -> None:
    """Raise ValueError for an invalid regular expression, or a grammar with a cyclic rule.

    This may take seconds, so it must run in the sandbox.
    """
    if structured_output.kind == "grammar" and "::=" in structured_output.value:  # else llguidance's notation
        acyclic(structured_output.value)
    if structured_output.kind == "regex":
        try:
            re.compile(_CLASS.sub("x", structured_output.value))
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"the regular expression is invalid: {str(error) or 'nested too deeply'}") from None


def uses_xgrammar(config: EngineConfig) -> bool:
    """Return whether TensorRT-LLM enforces structured output with the xgrammar that is installed here."""
    return config.engine_options.get("guided_decoding_backend") == "xgrammar" and bool(find_spec("xgrammar"))


def structured_output_check(config: EngineConfig) -> StructuredOutputCheck:
    if config.model is None or not uses_xgrammar(config):
        return check
    from handler.engines.structured_output.xgrammar import XgrammarCheck, for_xgrammar

    tried = XgrammarCheck(config.model, trust_remote_code=bool(config.engine_options.get("trust_remote_code")))

    def check_and_try(structured_output: StructuredOutput) -> None:
        check(structured_output)
        structured_output = for_xgrammar(structured_output)
        ((kind, text),) = guided_decoding_arguments(structured_output).items()
        tried(kind.upper(), str(text))

    return check_and_try
