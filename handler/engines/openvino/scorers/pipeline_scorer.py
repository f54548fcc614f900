"""Log-probabilities of prompts from a second GenAI pipeline, for GGUF files, which only GenAI reads.

`logit_scorer.py` says why the engine's own pipeline cannot score them. Prompts are scored one at a time, a step in
each of the engine's steps. The pipeline is loaded for the first one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from handler.engines.openvino.scorers.logit_scorer import Scores

NO_TOPS = "of a GGUF file that is served as it is it gives no alternatives to a prompt's tokens"


class PipelineScorer:
    """`make_pipeline` builds a pipeline without prefix cache."""

    def __init__(self, make_pipeline: Callable[[], Any]) -> None:
        self._make_pipeline = make_pipeline
        self._pipeline: Any = None
        self._waiting: deque[tuple[int, Any]] = deque()
        self._current: tuple[int, Any] | None = None
        self._logprobs: list[float] = []

    def check(self, num_tops: int) -> None:
        """Raise ValueError where prompts cannot be scored."""
        if num_tops:
            raise ValueError(NO_TOPS)

    def add(self, key: int, ids: Sequence[int], num_tops: int) -> None:
        import numpy
        import openvino

        self._waiting.append((key, openvino.Tensor(numpy.array([ids], dtype=numpy.int64))))

    def cancel(self, key: int) -> None:
        self._waiting = deque(item for item in self._waiting if item[0] != key)
        if self._current is not None and self._current[0] == key:
            self._current[1].cancel()
            self._pipeline.step()
            self._current = None

    def step(self) -> Scores | None:
        """Make one step of the current prompt; return its scores at its end."""
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
        # The first is a placeholder, the last the one token generated.
        return Scores(key, [None, *self._logprobs[1:-1]])

    def _start(self, key: int, tensor: Any) -> None:
        import openvino_genai

        if self._pipeline is None:
            self._pipeline = self._make_pipeline()
        config = openvino_genai.GenerationConfig(max_new_tokens=1, logprobs=1, echo=True, ignore_eos=True)
        self._logprobs = []
        self._current = (key, self._pipeline.add_request(key, tensor, config))
