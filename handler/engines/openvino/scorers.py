"""Computes the log-probabilities of prompts with a second copy of the model, in OpenVINO or, for GGUF files, in GenAI.

The pipeline that generates responses cannot be used for this (as measured with GenAI 2026.4). It does not report
alternatives, mixes up the logits of requests that share a step, and has no logits for tokens in its prefix cache. The
second copy scores one prompt at a time. It is compiled when it is first needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from handler.engines.base import Alternatives, EngineRequest, score

MODEL = "openvino_model.xml"

_TOKENS_PER_STEP = 256  # limits memory: each token takes four bytes for each entry of the vocabulary


def has_logits(model: Path) -> bool:
    """Return whether OpenVINO can read the model without GenAI, so that its logits are available."""
    return (model / MODEL).is_file()


class Scores(NamedTuple):
    """The log-probabilities of a prompt's tokens (None for the first), and each token's alternatives if requested."""

    key: int
    logprobs: Sequence[float | None]
    tops: Sequence[Alternatives] | None = None


class LogitScorer:
    """A scorer for models in OpenVINO's format. It processes one prompt at a time, in several steps.

    Args:
        model: an OpenVINO directory.
        properties: properties of OpenVINO's CPU plugin.
    """

    def __init__(self, model: Path, properties: Mapping[str, str]) -> None:
        self._model = model
        self._properties = dict(properties)
        self._request: Any = None
        self._inputs: set[str] = set()
        self._waiting: deque[EngineRequest] = deque()
        self._current: EngineRequest | None = None
        self._num_read = 0  # tokens of the current prompt
        self._logprobs: list[float] = []
        self._tops: list[Alternatives] = []

    def check(self, num_tops: int) -> None:
        """Raise ValueError if prompts cannot be scored."""
        if self._request is None:
            self._compile()

    def add(self, prompt: EngineRequest) -> None:
        """Queue a prompt. Call `check` first."""
        self._waiting.append(prompt)

    def cancel(self, key: int) -> None:
        self._waiting = deque(prompt for prompt in self._waiting if prompt.key != key)
        if self._current is not None and self._current.key == key:
            self._current = None

    def step(self) -> Scores | None:
        """Process a part of the current prompt. Return the scores of the prompt after the last part, otherwise None."""
        if self._current is None:
            if not self._waiting:
                return None
            self._current, self._num_read = self._waiting.popleft(), 0
            self._logprobs, self._tops = [], []
            self._request.reset_state()
        prompt, num_tops = self._current, self._current.sampling.prompt_top_logprobs
        part = prompt.ids[self._num_read : min(self._num_read + _TOKENS_PER_STEP, len(prompt.ids) - 1)]
        if len(part):
            following = prompt.ids[self._num_read + 1 : self._num_read + 1 + len(part)]
            logprobs, tops = score(self._logits(part), following, num_tops)
            self._logprobs += logprobs
            self._tops += tops
            self._num_read += len(part)
        if self._num_read < len(prompt.ids) - 1:
            return None
        self._current = None
        return Scores(prompt.key, [None, *self._logprobs], [(), *self._tops] if num_tops else None)

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
            raise ValueError(f"prompts cannot be scored: the model has unknown inputs: {', '.join(sorted(unknown))}")
        self._inputs, self._request = inputs, compiled.create_infer_request()


# -- log-probabilities of prompts from a second GenAI pipeline, for GGUF files: one prompt at a time -------------------


NO_TOPS = "it reports no alternatives to a prompt's tokens if a GGUF file is served without conversion"


class PipelineScorer:
    """A scorer for models that only GenAI can read. It processes one prompt after another.

    Args:
        make_pipeline: function that returns a pipeline without a prefix cache.
    """

    def __init__(self, make_pipeline: Callable[[], Any]) -> None:
        self._make_pipeline = make_pipeline
        self._pipeline: Any = None
        self._waiting: deque[tuple[int, Any]] = deque()
        self._current: tuple[int, Any] | None = None
        self._logprobs: list[float] = []

    def check(self, num_tops: int) -> None:
        """Raise ValueError if alternatives are requested."""
        if num_tops:
            raise ValueError(NO_TOPS)

    def add(self, prompt: EngineRequest) -> None:
        import numpy
        import openvino

        self._waiting.append((prompt.key, openvino.Tensor(numpy.array([prompt.ids], dtype=numpy.int64))))

    def cancel(self, key: int) -> None:
        self._waiting = deque(item for item in self._waiting if item[0] != key)
        if self._current is not None and self._current[0] == key:
            self._current[1].cancel()
            self._pipeline.step()
            self._current = None

    def step(self) -> Scores | None:
        """Run a step of the current prompt. Return the prompt's scores after the last step, otherwise None."""
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
        # The first number is a placeholder, and the last belongs to the generated token.
        return Scores(key, [None, *self._logprobs[1:-1]])

    def _start(self, key: int, tensor: Any) -> None:
        import openvino_genai

        if self._pipeline is None:
            self._pipeline = self._make_pipeline()
        config = openvino_genai.GenerationConfig(max_new_tokens=1, logprobs=1, echo=True, ignore_eos=True)
        self._logprobs = []
        self._current = (key, self._pipeline.add_request(key, tensor, config))
