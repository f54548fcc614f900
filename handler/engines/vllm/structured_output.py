"""Checks a schema, expression or grammar as vLLM would use it, without the model: verify, compile, make masks.

vLLM verifies it in the process that steps the engine, and compiles it on threads of its core. At every step it makes a
mask of allowed tokens. Its own classes do so here, in the sandbox (`process/sandbox_tasks.py`).
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import time
from collections import deque
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from handler.core.values import StructuredOutput
from handler.engines.base import EngineConfig
from handler.engines.structured_output.ebnf import later_parts
from handler.engines.structured_output.schema_keywords import XgrammarSupport, ignored
from handler.engines.structured_output.structural_tag import with_schemas, without_text
from handler.engines.vllm.arguments import engine_arguments, environment
from handler.engines.vllm.sampling import structured_output_arguments

_OF_AUTO = "xgrammar"
"""Backend of vLLM's core with `auto`: it follows from the first schema, which is a plain one of ours (`engine.py`)."""

CHECK_SECONDS = 0.1
"""CPU time of verifying, which stops every request each time the text comes. Ordinary ones took up to 0.016."""

STEP_SECONDS = 0.01
"""CPU time of a mask, averaged over a few tokens, or ten times as much once; it stops every request. Ordinary texts
took up to 0.0003, once 0.01; an ambiguous grammar takes seconds after ten or twenty tokens."""

_STYLES = {"json": (0, 1, 25), **dict.fromkeys(("qwen_xml", "minimax_xml", "deepseek_xml", "glm_xml"), (0, 2))}
"""Styles of arguments in structural tags -> the release of xgrammar that has them (`structural_tag.py` there)."""

_WINDOW = 8  # tokens of the average
_STEPS = 64  # tokens with many alternatives; those with few, as in a long literal, cost little
_PART_STEPS = 200  # the same, of a grammar's part
_FORCED_STEPS = 512
_FEW = 64
_WALK_SECONDS = 0.5

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
        import numpy as np
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
        self._mask = self._backend.allocate_token_bitmask(1)
        self._lengths = np.zeros(vllm_config.model_config.get_vocab_size(), np.int32)
        for token, id in self._tokenizer.get_vocab().items():
            if id < len(self._lengths):
                self._lengths[id] = len(token)
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
        parts = later_parts(text) if structured_output.kind == "grammar" and self._name == "xgrammar" else ()
        grammar = self._backend.compile_grammar(kind, text)
        for longest in (False, True):
            grammar.reset()
            self._walk(grammar, longest=longest)
        for part in parts:
            self._walk(self._backend.compile_grammar(kind, part), longest=False, steps=_PART_STEPS)
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

    def _walk(self, grammar: Any, *, longest: bool, steps: int = _STEPS) -> None:
        """Make the masks of an answer's first tokens: backends delay work until then.

        Args:
            longest: choose the longest of many allowed tokens, else a random one.
            steps: tokens with many alternatives.
        """
        import numpy as np

        draw, times = np.random.default_rng(0), deque[float](maxlen=_WINDOW)
        began, free, forced = time.process_time(), 0, 0
        while free < steps and forced < _FORCED_STEPS and time.process_time() - began < _WALK_SECONDS:
            before = time.process_time()
            grammar.fill_bitmask(self._mask, 0)
            spent = time.process_time() - before
            bits = np.unpackbits(self._mask[0].numpy().view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: len(self._lengths)])
            if not len(allowed):
                return
            few = len(allowed) <= _FEW
            forced, free = forced + few, free + (not few)
            id = allowed[self._lengths[allowed].argmax()] if few or longest else draw.choice(allowed)
            before = time.process_time()
            accepted = grammar.accept_tokens("", [int(id)])
            times.append(spent + time.process_time() - before)
            if times[-1] > 10 * STEP_SECONDS or sum(times) > _WINDOW * STEP_SECONDS:
                raise ValueError(f"each token takes the engine more than {STEP_SECONDS:g} s")
            if not accepted or grammar.is_terminated():
                return


def _xgrammar_support() -> XgrammarSupport:
    """Measured with xgrammar 0.2.8, which supports both; an older one, OpenVINO GenAI's, supports neither."""
    recent = _xgrammar_release() >= (0, 2)
    return XgrammarSupport(bounds=recent, others=recent)


def _xgrammar_release() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version("xgrammar"))[:3]))


def structural_tags(arguments: Mapping[str, Any]) -> frozenset[str]:
    """Return the styles of arguments in structural tags. Backends beside xgrammar have tags of an older form only.

    Args:
        arguments: the keywords of EngineArgs.
    """
    backend = arguments.get("structured_outputs_config", {}).get("backend", "auto")
    if backend not in ("auto", "xgrammar") or find_spec("xgrammar") is None:
        return frozenset()
    return frozenset(style for style, since in _STYLES.items() if _xgrammar_release() >= since)


def structured_output_check(config: EngineConfig) -> VllmCheck:
    return VllmCheck(config)
