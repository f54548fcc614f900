"""Translates Sampling into the keywords of vLLM's SamplingParams, and checks structured output as vLLM would use it."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from handler.core.values import Sampling, StructuredOutput
from handler.engines.base import COMMON_RULES, EngineConfig, Rule, arguments, drawn_or, top_choice, unless_neutral
from handler.engines.structured_output.ebnf import acyclic
from handler.engines.structured_output.xgrammar import (
    Walker,
    XgrammarSupport,
    ebnf,
    has_own_rules,
    ignored,
    said,
    with_schemas,
    without_text,
)
from handler.engines.vllm.arguments import engine_arguments, environment

FORBIDDEN = -1e9
"""Added to the logit of a token that must not come."""


def _logprobs(sampling: Sampling) -> dict[str, Any]:
    if not (sampling.logprobs or sampling.top_logprobs):
        return {}
    return {"logprobs": sampling.top_logprobs}  # 0: the chosen token's alone


def _prompt_logprobs(sampling: Sampling) -> dict[str, Any]:
    if not sampling.prompt_logprobs:
        return {}
    return {"prompt_logprobs": sampling.prompt_top_logprobs}  # 0: its own tokens' alone


def _bias(sampling: Sampling) -> dict[str, Any]:
    """Forbid tokens by a large negative bias."""
    bias = dict(sampling.logit_bias) | dict.fromkeys(sampling.bad_token_ids, FORBIDDEN)
    return {"logit_bias": bias} if bias else {}


def _structured_outputs(sampling: Sampling) -> dict[str, Any]:
    if sampling.structured_output is None:
        return {}
    return {"structured_outputs": structured_output_arguments(sampling.structured_output)}


def _by_beam_search(sampling: Sampling) -> dict[str, Any]:
    """Leave it to `engine.py`, which asks vLLM for single tokens."""
    return {}


_DRAWN: Mapping[str, Rule] = {
    "temperature": "temperature",
    "top_k": top_choice,
    "top_p": top_choice,
    "min_p": "min_p",
    "seed": lambda sampling: {"seed": sampling.signed_seed},
}
"""Fields that count where tokens are drawn."""

_TABLE: Mapping[str, Rule] = {
    **COMMON_RULES,
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "do_sample": drawn_or({"temperature": 0.0}, _DRAWN),
    "logprobs": _logprobs,
    "top_logprobs": _logprobs,
    "bad_sequences": unless_neutral("bad_sequences", "bad_words", list),
    "bad_token_ids": _bias,
    "logit_bias": _bias,
    "prompt_logprobs": _prompt_logprobs,
    "prompt_top_logprobs": _prompt_logprobs,
    "structured_output": _structured_outputs,
    "num_beams": _by_beam_search,
    "length_penalty": _by_beam_search,
    "early_stopping": _by_beam_search,
}

SUPPORTS = frozenset({*_TABLE, *_DRAWN})


def sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    """Make the keywords of SamplingParams, except the output kind; `structured_outputs` holds those of its class.

    Stop strings are left out: `core/text.py` finds them, so that vLLM need not make text at all.
    """
    return {"detokenize": False, **arguments(_TABLE, sampling)}


def structured_output_arguments(structured_output: StructuredOutput) -> dict[str, Any]:
    """Make the keywords of StructuredOutputsParams."""
    match structured_output.kind:
        case "json_schema":
            return {"json": structured_output.value}
        case "json_object":
            return {"json_object": True}
        case "choice":
            return {"choice": json.loads(structured_output.value)}
        case kind:
            return {kind: structured_output.value}


# -- a check of a schema, expression or grammar, without the model: verify, compile, make masks ------------------------
# vLLM verifies it in the process that steps the engine, and compiles it on threads of its core. At every step it makes
# a mask of allowed tokens. Its own classes do so here, in the sandbox (`process/sandbox.py`).


_OF_AUTO = "xgrammar"
"""Backend of vLLM's core with `auto`: it follows from the first schema, which is a plain one of ours (`engine.py`)."""

CHECK_SECONDS = 0.1
"""CPU time of verifying, which stops every request each time the text comes. Ordinary ones took up to 0.016."""

_STYLES = {"json": (0, 1, 25), **dict.fromkeys(("qwen_xml", "minimax_xml", "deepseek_xml", "glm_xml"), (0, 2))}
"""Styles of arguments in structural tags -> the release of xgrammar that has them (`structural_tag.py` there)."""

_BACKENDS = {
    "xgrammar": "backend_xgrammar.XgrammarBackend",
    "guidance": "backend_guidance.GuidanceBackend",
    "outlines": "backend_outlines.OutlinesBackend",
    "lm-format-enforcer": "backend_lm_format_enforcer.LMFormatEnforcerBackend",
}

_ODD_SCHEMA = StructuredOutput(
    "json_schema", '{"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 5}}}'
)
"""Makes vLLM import every backend that can verify."""

_SAMPLES = (
    StructuredOutput("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
    StructuredOutput("regex", "[a-z]{1,4}"),
    StructuredOutput("choice", '["a", "b"]'),
    StructuredOutput("grammar", 'root ::= "a" | "b"'),
)
"""One of each kind, to find a broken installation at the start."""


class VllmCheck:
    """See `engines.base.StructuredOutputCheck`."""

    def __init__(self, config: EngineConfig) -> None:
        os.environ.update(environment(config, os.environ))
        # A fork of this process has one thread, and its time is limited anyway.
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
        self._xgrammar = _xgrammar_support()
        self._walker = Walker(
            self._tokenizer.get_vocab(),
            vllm_config.model_config.get_vocab_size(),
            self._backend.allocate_token_bitmask(1),
            lambda grammar, mask: grammar.fill_bitmask(mask, 0),
            lambda grammar, id: grammar.accept_tokens("", [id]) and not grammar.is_terminated(),
        )
        self._verify(_ODD_SCHEMA)
        for sample in _SAMPLES:
            self(sample)

    def __call__(self, structured_output: StructuredOutput) -> None:
        self._check_keywords(structured_output)
        began = time.process_time()
        params = self._verify(structured_output)
        if time.process_time() - began > CHECK_SECONDS:
            raise ValueError(f"checking it takes the engine more than {CHECK_SECONDS:g} s")
        own = getattr(params.structured_outputs, "_backend", self._name)
        if own != self._name:  # the core has one backend, which would ignore parts that it does not know
            raise ValueError(f"{self._name} does not know all of it; option.guided_decoding_backend={own} does")
        kind, text = self._request.from_sampling_params(params).structured_output_key
        # Of the other backends, llguidance limits its own parser, and the rest have no grammars.
        rules = acyclic(ebnf(kind.name, text)) if self._name == "xgrammar" else None
        self._walker.start(self._matchers(kind, text))
        if rules is not None and has_own_rules(kind.name, text):
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
        """Check a part of a structural tag that is a schema."""
        if keyword := ignored(tag["json_schema"], self._xgrammar):
            other = "; option.guided_decoding_backend=guidance can" if self._guidance_takes(tag["json_schema"]) else ""
            raise ValueError(f"the schema's {keyword} cannot be followed by xgrammar{other}")
        return tag

    def _guidance_takes(self, schema: Any) -> bool:
        """Ask the backend guidance, which refuses what it does not know."""
        params = self._sampling_params(structured_outputs=self._guide_params(json=json.dumps(schema)))
        try:
            from vllm.v1.structured_output.backend_guidance import validate_guidance_grammar

            validate_guidance_grammar(params)
        except Exception:  # vLLM's own classes, which differ by version (0.32: VLLMValidationError, no ValueError)
            return False
        return True

    def _verify(self, structured_output: StructuredOutput) -> Any:
        """Do what `SamplingParams.verify` does; it may replace the text by another one."""
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
        """Compile a text once; return what gives its matcher in the first state."""
        try:
            grammar = self._backend.compile_grammar(kind, text)
        except Exception as error:
            raise ValueError(said(error)) from None

        def first() -> Any:
            grammar.reset()
            return grammar

        return first


def _xgrammar_support() -> XgrammarSupport:
    """Measured with xgrammar 0.2.8, which supports both; an older one, OpenVINO GenAI's, supports neither."""
    recent = _xgrammar_release() >= (0, 2)
    return XgrammarSupport(bounds=recent, others=recent)


def _xgrammar_release() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version("xgrammar"))[:3]))


def structural_tags(arguments: Mapping[str, Any]) -> frozenset[str]:
    """Return the styles of arguments in structural tags. Backends other than xgrammar only have tags of an older form.

    Args:
        arguments: the keywords of EngineArgs.
    """
    backend = arguments.get("structured_outputs_config", {}).get("backend", "auto")
    if backend not in ("auto", "xgrammar") or find_spec("xgrammar") is None:
        return frozenset()
    return frozenset(style for style, since in _STYLES.items() if _xgrammar_release() >= since)


def structured_output_check(config: EngineConfig) -> VllmCheck:
    return VllmCheck(config)
