"""A guide put through all that vLLM would do with it, but for the model: checking, compiling, masks of what may come.

vLLM checks a guide in the process that steps it, compiles it on threads of its core, and asks it at every step which
tokens are allowed; its own classes do so here. `engines/guide_process.py` keeps what never ends from being anybody's loss.
"""

from __future__ import annotations

import importlib
import inspect
import os
import time
from typing import Any

from handler.core import Guide
from handler.engines.base import EngineConfig
from handler.engines.vllm.arguments import engine_arguments, environment, guide_arguments

_OF_AUTO = "xgrammar"
"""What vLLM's core compiles with where it may choose: whatever the first guide that it gets needs, from then on. That
is a plain one of ours (`engine.py`)."""

CHECK_SECONDS = 0.25
"""Of computing in the process that steps vLLM: as long nobody gets a token."""

MASK_SECONDS = 0.05
"""Of computing a step's mask takes on average; nobody gets a token meanwhile."""

_STEPS = 128  # that are tried, of two answers that differ
_WALK_SECONDS = 1.0

_BACKENDS = {
    "xgrammar": "backend_xgrammar.XgrammarBackend",
    "guidance": "backend_guidance.GuidanceBackend",
    "outlines": "backend_outlines.OutlinesBackend",
    "lm-format-enforcer": "backend_lm_format_enforcer.LMFormatEnforcerBackend",
}

_SAMPLES = (
    Guide("json_schema", '{"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 5}}}'),
    Guide("regex", "[a-z]{1,4}"),
    Guide("choice", '["a", "b"]'),
    Guide("grammar", 'root ::= "a" | "b"'),
)
"""One of each kind, and with the first one each backend that may check: what cannot try these can try none."""


class VllmGuideTrial:
    """See `engines.base.GuideTrial`."""

    def __init__(self, config: EngineConfig) -> None:
        os.environ.update(environment(config, os.environ))
        # A copy of this process has one thread, and its time is limited anyway.
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
        made: Any = vllm.EngineArgs(**arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)
        self._config = made
        self._tokenizer = cached_tokenizer_from_config(made.model_config)
        chosen = str(made.structured_outputs_config.backend)
        self._backend = self._made(_OF_AUTO if chosen == "auto" else chosen)
        self._mask = self._backend.allocate_token_bitmask(1)
        for sample in _SAMPLES:
            self(sample)

    def __call__(self, guide: Guide) -> None:
        params = self._sampling_params(structured_outputs=self._guide_params(**guide_arguments(guide)))
        began = time.process_time()
        self._check(params)
        if time.process_time() - began > CHECK_SECONDS:
            raise ValueError(f"checking it takes the engine more than {CHECK_SECONDS:g} s")
        request = self._request.from_sampling_params(params)
        grammar = self._backend.compile_grammar(*request.structured_output_key)
        self._walk(grammar)

    def _check(self, params: Any) -> None:
        """What `SamplingParams.verify` does for guides; it may write another guide in its place."""
        check = params._validate_structured_outputs
        known = {
            "model_config": self._config.model_config,
            "structured_outputs_config": self._config.structured_outputs_config,
            "tokenizer": self._tokenizer,
        }
        check(**{name: known[name] for name in inspect.signature(check).parameters})

    def _made(self, name: str) -> Any:
        module, _, backend = _BACKENDS[name].partition(".")
        made = getattr(importlib.import_module(f"vllm.v1.structured_output.{module}"), backend)
        size = self._config.model_config.get_vocab_size()
        return made(self._config, tokenizer=self._tokenizer, vocab_size=size)

    def _walk(self, grammar: Any) -> None:
        """Some of the way along two answers: compilers put work off until its result is asked for."""
        import numpy as np

        draw = np.random.default_rng(0)
        began, steps = time.process_time(), 0
        for _ in range(2):
            for _ in range(_STEPS):
                grammar.fill_bitmask(self._mask, 0)
                steps += 1
                spent = time.process_time() - began
                if spent > _WALK_SECONDS or (steps > 8 and spent / steps > MASK_SECONDS):
                    raise ValueError(f"each token takes the engine more than {MASK_SECONDS:g} s")
                allowed = np.flatnonzero(np.unpackbits(self._mask[0].numpy().view(np.uint8), bitorder="little"))
                if not len(allowed) or not grammar.accept_tokens("", [int(draw.choice(allowed))]):
                    break
                if grammar.is_terminated():
                    break
            grammar.reset()


def guide_trial(config: EngineConfig) -> VllmGuideTrial:
    return VllmGuideTrial(config)
