"""Log-probabilities of prompts, from a second pipeline of their own.

The continuous-batching pipeline takes them from its neighbours' logits when other requests are in the same step, and
gives none for tokens that it has in its prefix cache (both measured with 2026.4). So prompts are scored one at a time,
a step of it for a step of the engine, and only then generated from. The pipeline is made when it is first needed: it
holds the weights a second time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any


class Scorer:
    """`make_pipeline` builds a pipeline without prefix cache."""

    def __init__(self, make_pipeline: Callable[[], Any]) -> None:
        self._make_pipeline = make_pipeline
        self._pipeline: Any = None
        self._waiting: deque[tuple[int, Any]] = deque()
        self._current: tuple[int, Any] | None = None
        self._logprobs: list[float] = []

    def add(self, key: int, tensor: Any) -> None:
        self._waiting.append((key, tensor))

    def cancel(self, key: int) -> None:
        self._waiting = deque(item for item in self._waiting if item[0] != key)
        if self._current is not None and self._current[0] == key:
            self._current[1].cancel()
            self._pipeline.step()
            self._current = None

    def step(self) -> tuple[int, Sequence[float | None]] | None:
        """One step of the prompt at hand; (key, a log-probability each, None for the first) when it is done."""
        if self._current is None:
            if not self._waiting:
                return None
            self._start(*self._waiting.popleft())
        assert self._current is not None
        key, handle = self._current
        self._pipeline.step()
        while handle.can_read():
            for output in handle.read().values():
                self._logprobs += output.generated_log_probs
        if self._pipeline.has_non_finished_requests():
            return None
        self._current = None
        return key, [None, *self._logprobs[1:-1]]  # the first is a placeholder, the last the one token generated

    def _start(self, key: int, tensor: Any) -> None:
        import openvino_genai

        if self._pipeline is None:
            self._pipeline = self._make_pipeline()
        config = openvino_genai.GenerationConfig(max_new_tokens=1, logprobs=1, echo=True, ignore_eos=True)
        self._logprobs = []
        self._current = (key, self._pipeline.add_request(key, tensor, config))
