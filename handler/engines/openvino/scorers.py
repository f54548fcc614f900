"""Computes the log-probabilities of prompts with a second copy of the model, in OpenVINO or, for GGUF files, in GenAI.

The pipeline that generates responses cannot be used for this (as measured with GenAI 2026.4). It does not report
alternatives, mixes up the logits of requests that share a step, and has no logits for tokens in its prefix cache. The
second copy scores one prompt at a time. It is compiled when it is first needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
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


class Scorer(ABC):
    """A queue of prompts, which are scored one at a time. Each step processes a part of the first prompt."""

    def __init__(self) -> None:
        self._waiting: dict[int, Generator[Scores | None]] = {}  # by key; the first one is being scored

    @abstractmethod
    def check(self, num_tops: int) -> None:
        """Raise ValueError if prompts cannot be scored, or not with this number of alternatives."""

    @abstractmethod
    def _score(self, prompt: EngineRequest) -> Generator[Scores | None]:
        """Yield None after each step except the last, which yields the scores. Closing the generator ends the work."""

    def add(self, prompt: EngineRequest) -> None:
        """Queue a prompt. Call `check` first."""
        self._waiting[prompt.key] = self._score(prompt)

    def cancel(self, key: int) -> None:
        if (steps := self._waiting.pop(key, None)) is not None:
            steps.close()

    def step(self) -> Scores | None:
        """Run a step of the first prompt. Return the prompt's scores after the last step, otherwise None."""
        if not self._waiting:
            return None
        scores = next(next(iter(self._waiting.values())))
        if scores is not None:
            self.cancel(scores.key)
        return scores


class LogitScorer(Scorer):
    """A scorer for models in OpenVINO's format.

    Args:
        model: an OpenVINO directory.
        properties: properties of OpenVINO's CPU plugin.
    """

    def __init__(self, model: Path, properties: Mapping[str, str]) -> None:
        super().__init__()
        self._model = model
        self._properties = dict(properties)
        self._request: Any = None
        self._inputs: set[str] = set()

    def check(self, num_tops: int) -> None:
        if self._request is None:
            self._compile()

    def _score(self, prompt: EngineRequest) -> Generator[Scores | None]:
        self._request.reset_state()
        num_tops, last = prompt.sampling.prompt_top_logprobs, len(prompt.ids) - 1
        logprobs: list[float | None] = [None]
        tops: list[Alternatives] = [()]
        for start in range(0, last, _TOKENS_PER_STEP):
            end = min(start + _TOKENS_PER_STEP, last)
            part_logprobs, part_tops = score(
                self._logits(prompt.ids[start:end], start), prompt.ids[start + 1 : end + 1], num_tops
            )
            logprobs += part_logprobs
            tops += part_tops
            if end < last:
                yield None
        yield Scores(prompt.key, logprobs, tops if num_tops else None)

    def _logits(self, part: Sequence[int], start: int) -> Any:
        import numpy

        end = start + len(part)
        values = {
            "input_ids": numpy.array([part], dtype=numpy.int64),
            "attention_mask": numpy.ones((1, end), dtype=numpy.int64),
            "position_ids": numpy.arange(start, end, dtype=numpy.int64)[None],
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


# -- log-probabilities of prompts from a second GenAI pipeline, for GGUF files -----------------------------------------


NO_TOPS = "it reports no alternatives to a prompt's tokens if a GGUF file is served without conversion"


class PipelineScorer(Scorer):
    """A scorer for models that only GenAI can read.

    Args:
        make_pipeline: function that returns a pipeline without a prefix cache.
    """

    def __init__(self, make_pipeline: Callable[[], Any]) -> None:
        super().__init__()
        self._make_pipeline = make_pipeline
        self._pipeline: Any = None

    def check(self, num_tops: int) -> None:
        if num_tops:
            raise ValueError(NO_TOPS)

    def _score(self, prompt: EngineRequest) -> Generator[Scores | None]:
        import numpy
        import openvino
        import openvino_genai

        if self._pipeline is None:
            self._pipeline = self._make_pipeline()
        ids = openvino.Tensor(numpy.array([prompt.ids], dtype=numpy.int64))
        config = openvino_genai.GenerationConfig(max_new_tokens=1, logprobs=1, echo=True, ignore_eos=True)
        handle = self._pipeline.add_request(prompt.key, ids, config)
        logprobs: list[float] = []
        try:
            while True:
                self._pipeline.step()
                while handle.can_read():
                    for output in handle.read().values():
                        logprobs += output.generated_log_probs
                if not self._pipeline.has_non_finished_requests():
                    break
                yield None
        except GeneratorExit:
            handle.cancel()
            self._pipeline.step()
            raise
        # The first number is a placeholder, and the last belongs to the generated token.
        yield Scores(prompt.key, [None, *logprobs[1:-1]])
