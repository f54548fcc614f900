"""Log-probabilities of prompts from the model's logits, by OpenVINO itself.

GenAI's continuous batching gives a token's own log-probability only, takes it from its neighbours' logits when other
requests are in the same step, and gives none for tokens in its prefix cache (all measured with 2026.4). So prompts are
scored one at a time by the model beside it, which holds the weights a second time: it is compiled when the first prompt
is to be scored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from handler.core.logprobs import Tops, score

MODEL = "openvino_model.xml"

_TOKENS_PER_STEP = 256  # logits take four bytes for each of the vocabulary, for each token


def has_logits(model: Path) -> bool:
    """OpenVINO itself can read the model, and so give its logits."""
    return (model / MODEL).is_file()


class Scores(NamedTuple):
    """A log-probability for each of a prompt's tokens, None for the first; `tops` where they were asked for."""

    key: int
    logprobs: Sequence[float | None]
    tops: Sequence[Tops] | None = None


class _Prompt(NamedTuple):
    key: int
    ids: Sequence[int]
    num_tops: int


class LogitScorer:
    """Scores prompts in turn, a part of one in each step.

    Args:
        model: an OpenVINO directory.
        properties: what the CPU plugin is told.
    """

    def __init__(self, model: Path, properties: Mapping[str, str]) -> None:
        self._model = model
        self._properties = dict(properties)
        self._request: Any = None
        self._inputs: set[str] = set()
        self._waiting: deque[_Prompt] = deque()
        self._current: _Prompt | None = None
        self._at = 0  # tokens of it that have been read
        self._logprobs: list[float] = []
        self._tops: list[Tops] = []

    def check(self, num_tops: int) -> None:
        """Raises ValueError where prompts cannot be scored."""
        if self._request is None:
            self._compile()

    def add(self, key: int, ids: Sequence[int], num_tops: int) -> None:
        """After `check`."""
        self._waiting.append(_Prompt(key, ids, num_tops))

    def cancel(self, key: int) -> None:
        self._waiting = deque(prompt for prompt in self._waiting if prompt.key != key)
        if self._current is not None and self._current.key == key:
            self._current = None

    def step(self) -> Scores | None:
        """Read a part of the prompt at hand; its scores when it has been read whole."""
        if self._current is None:
            if not self._waiting:
                return None
            self._current, self._at = self._waiting.popleft(), 0
            self._logprobs, self._tops = [], []
            self._request.reset_state()
        prompt = self._current
        part = prompt.ids[self._at : min(self._at + _TOKENS_PER_STEP, len(prompt.ids) - 1)]
        if len(part):
            following = prompt.ids[self._at + 1 : self._at + 1 + len(part)]
            logprobs, tops = score(self._logits(part), following, prompt.num_tops)
            self._logprobs += logprobs
            self._tops += tops
            self._at += len(part)
        if self._at < len(prompt.ids) - 1:
            return None
        self._current = None
        return Scores(prompt.key, [None, *self._logprobs], [(), *self._tops] if prompt.num_tops else None)

    def _logits(self, part: Sequence[int]) -> Any:
        import numpy

        end = self._at + len(part)
        given = {
            "input_ids": numpy.array([part], dtype=numpy.int64),
            "attention_mask": numpy.ones((1, end), dtype=numpy.int64),
            "position_ids": numpy.arange(self._at, end, dtype=numpy.int64)[None],
            "beam_idx": numpy.zeros(1, dtype=numpy.int32),
        }
        self._request.infer({name: given[name] for name in self._inputs})
        return self._request.get_tensor("logits").data[0].astype(numpy.float32, copy=False)

    def _compile(self) -> None:
        import openvino

        compiled = openvino.Core().compile_model(self._model / MODEL, "CPU", self._properties)
        inputs = {one.any_name for one in compiled.inputs}
        if unknown := inputs - {"input_ids", "attention_mask", "position_ids", "beam_idx"}:
            raise ValueError(f"prompts cannot be scored: the model wants {', '.join(sorted(unknown))} too")
        self._inputs, self._request = inputs, compiled.create_infer_request()
