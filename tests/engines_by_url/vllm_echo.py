"""A logits processor, as vLLM loads one by `--logits-processors`: it has the model say its prompt again and again.

A request with `ignore_eos` gets at most 100 tokens a second, so that something can happen meanwhile. One with the stop
token FREE, or a rule for its answer, is left to the model.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from tests.engines_by_url.vllm_server import FREE

_PAUSE = 0.01


class Echo(LogitsProcessor):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """Each row's prompt, and the answer so far, which vLLM goes on with."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[SamplingParams, list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, prompt, answer in batch_update.added:
            self._rows[row] = params, prompt or [], answer
        for source, target, direction in batch_update.moved:
            moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if direction is MoveDirectionality.SWAP and replaced is not None:
                self._rows[source] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (params, prompt, answer) in self._rows.items():
            if params.structured_outputs is None and FREE not in (params.stop_token_ids or ()):
                logits[row] = -torch.inf
                logits[row, prompt[len(answer) % len(prompt)]] = 0.0
        if any(params.ignore_eos for params, _, _ in self._rows.values()):
            time.sleep(_PAUSE)
        return logits
