"""Computes the log-probabilities of prompts and of labels with a second copy of the model, in OpenVINO or GenAI.

The pipeline that generates responses cannot be used for this (as measured with GenAI 2026.4). It does not report
alternatives, mixes up the logits of requests that share a step, and has no logits for tokens in its prefix cache. The
second copy scores one prompt at a time. It is compiled when it is first needed. GenAI is used for GGUF files that are
served without conversion.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from handler.core.values import Pooling
from handler.engines.base import Alternatives, EngineRequest, score, score_labels

MODEL = "openvino_model.xml"

_TOKENS_PER_STEP = 256  # limits memory: each token takes four bytes for each entry of the vocabulary
_PREFIX_BYTES = 1 << 28  # limits the memory of stored prefixes; a single prefix may be larger


def has_logits(model: Path) -> bool:
    """Return whether OpenVINO can read the model without GenAI, so that its logits are available."""
    return (model / MODEL).is_file()


class Scores(NamedTuple):
    """The log-probabilities of a prompt's tokens (None for the first), and each token's alternatives if requested.

    For a request with labels, `logprobs` is the vector that the request asks for (see `Pooling`).
    """

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
        self._prefixes = PrefixStates()

    def check(self, num_tops: int) -> None:
        if self._request is None:
            self._compile()

    def _score(self, prompt: EngineRequest) -> Generator[Scores | None]:
        return self._labels(prompt) if isinstance(prompt.parameters, Pooling) else self._prompt(prompt)

    def _labels(self, prompt: EngineRequest) -> Generator[Scores | None]:
        """Compute the log-probabilities of labels. The prefix that requests share is computed only once.

        A request with a prefix that is not stored takes the same two parts, so its numbers are the same.
        """
        ids, pooling = prompt.ids, prompt.pooling
        num_shared = min(pooling.num_shared, len(ids) - 1)
        key: tuple[str | int, ...] = (pooling.cache_salt, *ids[:num_shared])
        if not self._prefixes.restore(key, self._request):
            self._request.reset_state()
            for start in range(0, num_shared, _TOKENS_PER_STEP):
                self._logits(ids[start : min(start + _TOKENS_PER_STEP, num_shared)], start)
                yield None
            if num_shared:
                self._prefixes.store(key, self._request)
        rows: Any = ()
        for start in range(num_shared, len(ids), _TOKENS_PER_STEP):
            rows = self._logits(ids[start : start + _TOKENS_PER_STEP], start)
            if start + _TOKENS_PER_STEP < len(ids):
                yield None
        yield Scores(prompt.key, score_labels(rows[-1], pooling.label_ids))

    def _prompt(self, prompt: EngineRequest) -> Generator[Scores | None]:
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


class PrefixStates:
    """Stores the states of a model after the prefixes of prompts. The prefixes used last are kept.

    The result of a request must not depend on earlier requests, so only a whole prefix is reused, never a part of one.
    """

    def __init__(self) -> None:
        self._states: OrderedDict[tuple[str | int, ...], list[Any]] = OrderedDict()
        self._num_bytes = 0

    def restore(self, key: tuple[str | int, ...], request: Any) -> bool:
        """Set the states of an inference request to those after a prefix. Return whether they are stored."""
        if key not in self._states:
            return False
        self._states.move_to_end(key)
        for state, tensor in zip(request.query_state(), self._states[key], strict=True):
            state.state = tensor
        return True

    def store(self, key: tuple[str | int, ...], request: Any) -> None:
        """Store copies of an inference request's states, and drop the prefixes for which there is no room."""
        import openvino

        tensors = [openvino.Tensor(state.state.data.copy()) for state in request.query_state()]
        self._states[key] = tensors
        self._num_bytes += _num_bytes(tensors)
        while self._num_bytes > _PREFIX_BYTES and len(self._states) > 1:
            self._num_bytes -= _num_bytes(self._states.popitem(last=False)[1])


def _num_bytes(tensors: Sequence[Any]) -> int:
    return sum(tensor.byte_size for tensor in tensors)


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
        if isinstance(prompt.parameters, Pooling):
            yield from self._labels(prompt)
        else:
            # The first number is a placeholder, and the last belongs to the generated token.
            numbers = yield from self._echo(prompt.key, prompt.ids)
            yield Scores(prompt.key, [None, *numbers[1:-1]])

    def _labels(self, prompt: EngineRequest) -> Generator[Scores | None]:
        """Compute the log-probabilities of labels, each as the last token of a prompt."""
        numbers = list[float]()
        for id in prompt.pooling.label_ids:
            echoed = yield from self._echo(prompt.key, [*prompt.ids, id])
            numbers.append(echoed[-2])
        echoed = yield from self._echo(prompt.key, prompt.ids)  # greedy decoding chooses the most likely token
        yield Scores(prompt.key, [*numbers, echoed[-1]])

    def _echo(self, key: int, ids: Sequence[int]) -> Generator[None, None, list[float]]:
        """Return the log-probabilities of a prompt and of the token that follows it."""
        import numpy
        import openvino
        import openvino_genai

        if self._pipeline is None:
            self._pipeline = self._make_pipeline()
        tensor = openvino.Tensor(numpy.array([ids], dtype=numpy.int64))
        config = openvino_genai.GenerationConfig(max_new_tokens=1, logprobs=1, echo=True, ignore_eos=True)
        handle = self._pipeline.add_request(key, tensor, config)
        logprobs: list[float] = []
        try:
            while True:
                self._pipeline.step()
                while handle.can_read():
                    for output in handle.read().values():
                        logprobs += output.generated_log_probs
                if not self._pipeline.has_non_finished_requests():
                    return logprobs
                yield None
        except GeneratorExit:
            handle.cancel()
            self._pipeline.step()
            raise
