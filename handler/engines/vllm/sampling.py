"""Translates Sampling into the arguments of vLLM's SamplingParams, and checks structured output."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from handler.core.values import Sampling, StructuredOutput
from handler.engines.base import (
    COMMON_RULES,
    EngineConfig,
    Rule,
    arguments,
    drawn_or,
    drawn_rules,
    logprob_rules,
    passed_otherwise,
    unless_neutral,
)
from handler.engines.structured_output.ebnf import acyclic
from handler.engines.structured_output.xgrammar import (
    ENFORCES_LIMITS_SINCE,
    Walker,
    ebnf,
    error_message,
    for_xgrammar,
    has_client_rules,
    ignored,
    release,
    with_schemas,
    without_text,
)
from handler.engines.vllm.arguments import engine_arguments, environment

FORBIDDEN = -1e9
"""The bias to add to the logit of a forbidden token."""


def _bias(sampling: Sampling) -> dict[str, Any]:
    """Return the request's biases, plus a large negative bias for each forbidden token."""
    bias = dict(sampling.logit_bias) | dict.fromkeys(sampling.bad_token_ids, FORBIDDEN)
    return {"logit_bias": bias} if bias else {}


def structured_output_arguments(structured_output: StructuredOutput) -> dict[str, Any]:
    """Return the arguments of StructuredOutputsParams."""
    match structured_output.kind:
        case "json_schema":
            return {"json": structured_output.value}
        case "json_object":
            return {"json_object": True}
        case "choice":
            return {"choice": json.loads(structured_output.value)}
        case kind:
            return {kind: structured_output.value}


_DRAWN: Mapping[str, Rule] = {**drawn_rules(), "seed": lambda sampling: {"seed": sampling.signed_seed}}
"""Rules for the fields that matter only when sampling."""

_TABLE: Mapping[str, Rule] = {
    **COMMON_RULES,
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "do_sample": drawn_or({"temperature": 0.0}, _DRAWN),
    **logprob_rules(),
    "bad_sequences": unless_neutral("bad_sequences", "bad_words", list),
    "bad_token_ids": _bias,
    "logit_bias": _bias,
    "allowed_token_ids": unless_neutral("allowed_token_ids", make=list),
    "structured_output": unless_neutral("structured_output", "structured_outputs", structured_output_arguments),
    # `engine.py` implements beam search, and passes the cache's salt with the prompt.
    "num_beams": passed_otherwise,
    "length_penalty": passed_otherwise,
    "early_stopping": passed_otherwise,
    "cache_salt": passed_otherwise,
}

SUPPORTS = frozenset({*_TABLE, *_DRAWN})


def sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    """Return the arguments of SamplingParams, except the output kind.

    For `structured_outputs`, they contain a dict for StructuredOutputsParams. Stop strings are not passed to vLLM,
    because `core/text.py` finds them, so vLLM does not have to decode ids at all.
    """
    return {"detokenize": False, **arguments(_TABLE, sampling)}


# -- check a schema or grammar without the model: verify it, compile it and compute masks ------------------------------
# vLLM verifies a schema in the process that steps the engine, and compiles it on threads of its core. At every step it
# computes a mask of allowed tokens. The check does the same with vLLM's classes in the sandbox (`process/sandbox.py`).


_OF_AUTO = "xgrammar"
"""The backend that vLLM's core chooses for `auto`, because the handler itself sends a simple first schema
(`engine.py`).
"""

CHECK_SECONDS = 0.1
"""Limit on the CPU time, in seconds, for verifying a schema or grammar. vLLM verifies it again for every request, while
all other requests wait. Ordinary schemas took up to 0.016 s."""

_STYLES = {"json": (0, 1, 25), **dict.fromkeys(("qwen_xml", "minimax_xml", "deepseek_xml", "glm_xml"), (0, 2))}
"""Argument styles in structural tags, with the first xgrammar release that supports each (`structural_tag.py`)."""

_BACKENDS = {
    "xgrammar": "backend_xgrammar.XgrammarBackend",
    "guidance": "backend_guidance.GuidanceBackend",
    "outlines": "backend_outlines.OutlinesBackend",
    "lm-format-enforcer": "backend_lm_format_enforcer.LMFormatEnforcerBackend",
}

_ODD_SCHEMA = StructuredOutput(
    "json_schema", '{"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 5}}}'
)
"""A schema that makes vLLM import every backend that `auto` may choose. Only xgrammar refuses the schema."""

_SAMPLES = (
    StructuredOutput("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
    StructuredOutput("regex", "[a-z]{1,4}"),
    StructuredOutput("choice", '["a", "b"]'),
)
"""Examples of the kinds that all backends support, for detecting a broken installation at startup. A backend refuses
other kinds by itself: `outlines` grammars and `json_object`, and `lm-format-enforcer` grammars."""


class VllmCheck:
    """A check that uses vLLM's own classes. See `engines.base.StructuredOutputCheck`."""

    def __init__(self, config: EngineConfig) -> None:
        os.environ.update(environment(config, os.environ))
        # A fork of this process has only one thread, and its time is limited anyway.
        os.environ.update(VLLM_REGEX_COMPILATION_TIMEOUT_S="0", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
        import vllm
        from vllm.platforms import current_platform
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams
        from vllm.tokenizers import cached_tokenizer_from_config
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.structured_output.request import StructuredOutputRequest

        self._sampling_params, self._guide_params = SamplingParams, StructuredOutputsParams
        self._request = StructuredOutputRequest
        arguments = engine_arguments(config, current_platform.device_count() or 1, cpu=current_platform.is_cpu())
        vllm_config: Any = vllm.EngineArgs(**arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)
        self._config = vllm_config
        self._tokenizer = cached_tokenizer_from_config(vllm_config.model_config)
        chosen = str(vllm_config.structured_outputs_config.backend)
        self._name = _OF_AUTO if chosen == "auto" else chosen
        self._backend = self._make_backend(self._name)
        self._recent_xgrammar = release() >= ENFORCES_LIMITS_SINCE
        self._walker = Walker(
            self._tokenizer.get_vocab(),
            vllm_config.model_config.get_vocab_size(),
            self._backend.allocate_token_bitmask(1),
            lambda grammar, mask: grammar.fill_bitmask(mask, 0),
            lambda grammar, id: grammar.accept_tokens("", [id]) and not grammar.is_terminated(),
        )
        self._verify(_ODD_SCHEMA if chosen == "auto" else _SAMPLES[0])  # untimed, because it imports the backends
        for sample in _SAMPLES:
            self(sample)

    def __call__(self, structured_output: StructuredOutput) -> None:
        self._check_keywords(structured_output)
        rule = for_xgrammar(structured_output) if self._name == _OF_AUTO else structured_output
        began = time.process_time()
        params = self._verify(rule)
        if time.process_time() - began > CHECK_SECONDS:
            raise ValueError(f"checking the schema or grammar takes the engine more than {CHECK_SECONDS:g} s")
        backend = getattr(params.structured_outputs, "_backend", self._name)
        if backend != self._name:  # the core only uses one backend, which would ignore unsupported parts
            raise ValueError(
                f"only option.guided_decoding_backend={backend} supports every part of the schema or grammar"
            )
        kind, text = self._request.from_sampling_params(params).structured_output_key
        # Of the other backends, llguidance limits its own parser, and the others do not support grammars.
        rules = acyclic(ebnf(kind.name, text)) if self._name == "xgrammar" else None
        self._walker.start(self._matchers(kind, text))
        if rules is not None and has_client_rules(kind.name, text):
            for abridged in rules.abridged():
                self._walker.abridged(self._matchers(type(kind).GRAMMAR, abridged))
        if structured_output.allows_text:
            self(without_text(structured_output))

    def _check_keywords(self, structured_output: StructuredOutput) -> None:
        if self._name != _OF_AUTO:
            return
        if structured_output.kind == "json_schema":
            self._check_schema({"json_schema": json.loads(structured_output.value)})
        elif structured_output.kind == "structural_tag":
            with_schemas(json.loads(structured_output.value)["format"], self._check_schema)

    def _check_schema(self, tag: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raise ValueError if xgrammar ignores a keyword of the tag's `json_schema`. Return the tag unchanged."""
        schema = tag["json_schema"]
        if keyword := ignored(schema, self._recent_xgrammar):
            remedy = "set option.guided_decoding_backend=guidance" if self._guidance_supports(schema) else "remove it"
            raise ValueError(f"xgrammar does not enforce the schema's {keyword}: {remedy}")
        return tag

    def _guidance_supports(self, schema: Any) -> bool:
        """Return whether the backend `guidance` accepts a schema. This backend refuses unsupported keywords itself."""
        params = self._sampling_params(structured_outputs=self._guide_params(json=json.dumps(schema)))
        try:
            from vllm.v1.structured_output.backend_guidance import validate_guidance_grammar

            validate_guidance_grammar(params)
        except Exception:  # the class depends on vLLM's version (0.32: VLLMValidationError, which is not a ValueError)
            return False
        return True

    def _verify(self, structured_output: StructuredOutput) -> Any:
        """Verify a schema or grammar like `SamplingParams.verify`. Return the parameters, as vLLM may change them."""
        params = self._sampling_params(
            structured_outputs=self._guide_params(**structured_output_arguments(structured_output))
        )
        check = params._validate_structured_outputs
        arguments = {
            "model_config": self._config.model_config,
            "structured_outputs_config": self._config.structured_outputs_config,
            "tokenizer": self._tokenizer,
        }
        check(**{name: arguments[name] for name in inspect.signature(check).parameters})
        return params

    def _make_backend(self, name: str) -> Any:
        module, _, backend = _BACKENDS[name].partition(".")
        make = getattr(importlib.import_module(f"vllm.v1.structured_output.{module}"), backend)
        size = self._config.model_config.get_vocab_size()
        return make(self._config, tokenizer=self._tokenizer, vocab_size=size)

    def _matchers(self, kind: Any, text: str) -> Callable[[], Any]:
        """Compile a schema or grammar, and return a function that returns a matcher for it in the initial state."""
        try:
            grammar = self._backend.compile_grammar(kind, text)
        except Exception as error:
            raise ValueError(error_message(error)) from None

        def first() -> Any:
            grammar.reset()
            return grammar

        return first


def uses_xgrammar(arguments: Mapping[str, Any]) -> bool:
    """Return whether vLLM enforces structured output with xgrammar.

    Args:
        arguments: the arguments of EngineArgs.
    """
    backend = arguments.get("structured_outputs_config", {}).get("backend", "auto")
    return backend in ("auto", _OF_AUTO) and find_spec("xgrammar") is not None


def structural_tags(arguments: Mapping[str, Any]) -> frozenset[str]:
    """Return the supported argument styles for structural tags. Only xgrammar supports these tags.

    Args:
        arguments: the arguments of EngineArgs.
    """
    if not uses_xgrammar(arguments):
        return frozenset()
    return frozenset(style for style, since in _STYLES.items() if release() >= since)


structured_output_check = VllmCheck
