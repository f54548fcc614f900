"""Log-probabilities of prompts from the model's logits, by OpenVINO itself.

GenAI's continuous batching reports no alternatives. It uses other requests' logits when they share a step. It has none
for tokens in its prefix cache (measured with 2026.4). So a second copy of the model scores prompts, one at a time. It
is compiled for the first one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from handler.engines.base import Alternatives
from handler.engines.logprobs import score

MODEL = "openvino_model.xml"

_TOKENS_PER_STEP = 256  # logits take four bytes for each of the vocabulary, for each token


def has_logits(model: Path) -> bool:
    """Whether OpenVINO itself can read the model, and so has its logits."""
    return (model / MODEL).is_file()


class Scores(NamedTuple):
    """A log-probability for each of a prompt's tokens, None for the first; alternatives on request."""

    key: int
    logprobs: Sequence[float | None]
    tops: Sequence[Alternatives] | None = None


class _Prompt(NamedTuple):
    key: int
    ids: Sequence[int]
    num_tops: int


class LogitScorer:
    """Scores prompts one after another, a part in each step.

    Args:
        model: an OpenVINO directory.
        properties: the CPU plugin's.
    """

    def __init__(self, model: Path, properties: Mapping[str, str]) -> None:
        self._model = model
        self._properties = dict(properties)
        self._request: Any = None
        self._inputs: set[str] = set()
        self._waiting: deque[_Prompt] = deque()
        self._current: _Prompt | None = None
        self._num_read = 0  # tokens of the current prompt
        self._logprobs: list[float] = []
        self._tops: list[Alternatives] = []

    def check(self, num_tops: int) -> None:
        """Raise ValueError where prompts cannot be scored."""
        if self._request is None:
            self._compile()

    def add(self, key: int, ids: Sequence[int], num_tops: int) -> None:
        """Queue a prompt; only after `check`."""
        self._waiting.append(_Prompt(key, ids, num_tops))

    def cancel(self, key: int) -> None:
        self._waiting = deque(prompt for prompt in self._waiting if prompt.key != key)
        if self._current is not None and self._current.key == key:
            self._current = None

    def step(self) -> Scores | None:
        """Read a part of the current prompt; return its scores at its end."""
        if self._current is None:
            if not self._waiting:
                return None
            self._current, self._num_read = self._waiting.popleft(), 0
            self._logprobs, self._tops = [], []
            self._request.reset_state()
        prompt = self._current
        part = prompt.ids[self._num_read : min(self._num_read + _TOKENS_PER_STEP, len(prompt.ids) - 1)]
        if len(part):
            following = prompt.ids[self._num_read + 1 : self._num_read + 1 + len(part)]
            logprobs, tops = score(self._logits(part), following, prompt.num_tops)
            self._logprobs += logprobs
            self._tops += tops
            self._num_read += len(part)
        if self._num_read < len(prompt.ids) - 1:
            return None
        self._current = None
        return Scores(prompt.key, [None, *self._logprobs], [(), *self._tops] if prompt.num_tops else None)

    def _logits(self, part: Sequence[int]) -> Any:
        import numpy

        end = self._num_read + len(part)
        values = {
            "input_ids": numpy.array([part], dtype=numpy.int64),
            "attention_mask": numpy.ones((1, end), dtype=numpy.int64),
            "position_ids": numpy.arange(self._num_read, end, dtype=numpy.int64)[None],
            "beam_idx": numpy.zeros(1, dtype=numpy.int32),
        }
        self._request.infer({name: values[name] for name in self._inputs})
        return self._request.get_tensor("logits").data[0].astype(numpy.float32, copy=False)

    def _compile(self) -> None:
        import openvino

        compiled = openvino.Core().compile_model(self._model / MODEL, "CPU", self._properties)
        inputs = {port.any_name for port in compiled.inputs}
        if unknown := inputs - {"input_ids", "attention_mask", "position_ids", "beam_idx"}:
            raise ValueError(f"prompts cannot be scored: the model wants {', '.join(sorted(unknown))} too")
        self._inputs, self._request = inputs, compiled.create_infer_request()
