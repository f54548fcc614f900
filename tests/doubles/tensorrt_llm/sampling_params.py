"""SamplingParams and GuidedDecodingParams (sampling_params.py of TensorRT-LLM 1.2)."""

from __future__ import annotations

import os
from typing import Any

import numpy
from tensorrt_llm._double.api import MANNERS, record


class _Guided:
    __slots__ = ()

    def __post_init__(self: Any) -> None:
        given = [self.json, self.regex, self.grammar, self.json_object or None, self.structural_tag]
        if sum(one is not None for one in given) > 1:
            raise ValueError("Only one guide can be used for a request")


class _Checked:
    __slots__ = ()

    def __post_init__(self: Any) -> None:
        if self.pad_id is None:
            self.pad_id = self.end_id
        if self.embedding_bias is not None:
            self.embedding_bias = numpy.array(self.embedding_bias, dtype=numpy.float32)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                setattr(self, name, int(getattr(self, name)))
        if MANNERS.release > (1, 0):
            if self.top_p is not None and not 0 <= self.top_p <= 1:
                raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
            if self.top_k is not None and self.top_k < 0:
                raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
            if self.temperature is not None and self.temperature < 0:
                raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")
        if self.best_of is None:
            self.best_of = self.n
        if self.best_of < self.n:
            raise ValueError("best_of must be at least n")
        many = self.best_of > 1 and not self.use_beam_search and "TLLM_ALLOW_N_GREEDY_DECODING" not in os.environ
        if many and self._greedy:
            raise ValueError("Greedy decoding gives one sequence only")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
            raise ValueError("truncate_prompt_tokens must be at least 1")
        if self.prompt_logprobs and not self.return_context_logits:
            self._context_logits_auto_enabled = True

    @property
    def _greedy(self: Any) -> bool:
        if self.use_beam_search:
            return False
        if MANNERS.release == (1, 0):
            return self.top_k in (None, 1) and self.top_p in (None, 0.0)
        unset = self.temperature is None and self.top_p is None and self.top_k is None
        return bool(unset or self.top_k == 1 or self.top_p == 0 or self.temperature == 0)

    def _setup(self: Any, tokenizer: Any, generation_config: dict[str, Any]) -> None:
        """What the LLM writes into its caller's object; nothing where `end_id` was given, or written before."""
        if self.end_id is not None:
            return
        if tokenizer is None:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        self.end_id = tokenizer.eos_token_id
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.end_id
        self._stop_word_ids = _encoded(tokenizer, self.stop)
        self._bad_word_ids = _encoded(tokenizer, self.bad)
        further = generation_config.get("eos_token_id") or []
        for id in [further] if isinstance(further, int) else further:
            if id != self.end_id:
                self.stop_token_ids = [*(self.stop_token_ids or []), id]

    def _words(self: Any, name: str) -> list[list[int]]:
        """All ids that stop, or are forbidden, as sequences.

        Raises:
            RuntimeError: there are strings which nobody made ids of.
        """
        strings, ids = getattr(self, name), getattr(self, f"{name}_token_ids")
        encoded = self._stop_word_ids if name == "stop" else self._bad_word_ids
        if strings and encoded is None:
            raise RuntimeError(f"{name}={strings} is not processed by tokenizer, please call the setup method")
        return [[id] for id in ids or []] + list(encoded or [])


def _encoded(tokenizer: Any, strings: str | list[str] | None) -> list[list[int]] | None:
    if strings is None:
        return None
    found = [strings] if isinstance(strings, str) else strings
    return [tokenizer.encode(one, add_special_tokens=False) for one in found]


GuidedDecodingParams: Any = record("GuidedDecodingParams", (_Guided,), kw_only=True, slots=True)
SamplingParams: Any = record(
    "SamplingParams", (_Checked,), kw_only=True, slots=True,
    _bad_word_ids=None, _stop_word_ids=None, _stream_interval=None, _times_used=0,
)  # fmt: skip
