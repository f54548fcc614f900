"""Computes the log-probabilities of prompts and of labels with a second copy of the model, in OpenVINO or GenAI.

The pipeline that generates responses cannot be used for this (as measured with GenAI 2026.4). It does not report
alternatives, mixes up the logits of requests that share a step, and has no logits for tokens in its prefix cache. The
second copy scores one prompt at a time. It is compiled when it is first needed. GenAI is used for GGUF files that are
served without conversion.
"""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from handler.core.fair_queue import FairQueue
from handler.core.loop import settle
from handler.core.values import Pooling
from handler.engines.base import Alternatives, EngineRequest, score, score_labels
from handler.engines.openvino.logits import LogitModel, Prefix, PrefixStates, States

MODEL = "openvino_model.xml"

_TOKENS_PER_STEP = 256  # limits memory: each token takes four bytes for each entry of the vocabulary
IDLE_SECONDS = 0.02
"""How long a step waits for a model to load if the engine has nothing else to do."""

T = TypeVar("T")


def load_on_thread(load: Callable[[], T]) -> Future[T]:
    """Load a second copy of a model on a thread, because the streams of other requests must not wait for it."""
    loading = Future[T]()
    threading.Thread(target=functools.partial(settle, loading, load), name="second copy", daemon=True).start()
    return loading


def has_logits(model: Path) -> bool:
    """Return whether OpenVINO can read the model without GenAI, so that its logits are available."""
    return (model / MODEL).is_file()


class Scores(NamedTuple):
    """The log-probabilities of a prompt's tokens (None for the first), and each token's alternatives if requested.

    For a request with labels, `logprobs` are the numbers that `Pooling` describes. If `error` is not
    empty, the prompt could not be scored.
    """

    key: int
    logprobs: Sequence[float | None] = ()
    tops: Sequence[Alternatives] | None = None
    error: str = ""


Work = Generator[Scores | None]
"""Scores a prompt: yields None after each step except the last, which yields the scores. Closing it ends the work."""


class _Turn(NamedTuple):
    """The turn of prompts that share a prefix.

    Attributes:
        flow: the flow of the prompts in the queue.
        num_left: number of prompts that may follow in the same turn.
        num_steps: number of steps that the first prompt has taken without a result, or None for a later prompt.
    """

    flow: Hashable = None
    num_left: int = 0
    num_steps: int | None = None

    def after_step(self) -> _Turn:
        """Return the turn after a step without a result."""
        if self.num_steps is None:
            return self
        return self._replace(num_left=self.num_steps, num_steps=self.num_steps + 1)


class Scorer(ABC):
    """A queue of prompts, which are scored one at a time. Each step processes a part of one prompt.

    Prompts that share a prefix wait for each other, and the other prompts have turns between them. A turn has as many
    prompts as the prefix took steps, so that prefixes that displace each other are not computed again for every prompt.
    """

    def __init__(self) -> None:
        self._waiting = FairQueue[EngineRequest]()
        self._current: tuple[int, Work] | None = None  # the key of the prompt that is being scored, and its work
        self._loading: Future[Any] | None = None
        self._turn = _Turn()

    @abstractmethod
    def check(self, num_tops: int) -> None:
        """Raise ValueError if prompts cannot be scored, or not with this number of alternatives."""

    @abstractmethod
    def _load(self) -> Any:
        """Load the second copy of the model. This is called once, on a thread of its own."""

    @abstractmethod
    def _score(self, model: Any, prompt: EngineRequest) -> Work:
        """Score a prompt with what `_load` has returned."""

    def add(self, prompt: EngineRequest) -> None:
        """Queue a prompt. Call `check` first."""
        loading = self._loading
        if not len(self._waiting) and loading is not None and loading.done() and loading.exception() is not None:
            self._loading = None  # the prompts that waited for the load have failed, so later ones try again
        self._waiting.put(_flow(prompt), prompt)

    def cancel(self, key: int) -> None:
        if self._current is not None and self._current[0] == key:
            self._current[1].close()
            self._current = None
        else:
            self._waiting.drop(lambda prompt: prompt.key == key)

    def step(self, *, idle: bool) -> Scores | None:
        """Run a step of a prompt. Return the prompt's scores after the last step, otherwise None.

        Args:
            idle: whether the engine has nothing else to do, so that the step may wait until the model is loaded.
        """
        if self._current is None:
            loading = self._start_loading()
            if not len(self._waiting) or not futures.wait([loading], IDLE_SECONDS if idle else 0.0).done:
                return None
            prompt = self._next()
            if (error := loading.exception()) is not None:
                return Scores(prompt.key, error=f"the second copy of the model cannot be loaded: {error}")
            self._current = prompt.key, self._score(loading.result(), prompt)
        scores = next(self._current[1])
        if scores is None:
            self._turn = self._turn.after_step()
        else:
            self.cancel(scores.key)
        return scores

    def _next(self) -> EngineRequest:
        """Remove the next prompt from the queue, which is not empty."""
        turn = self._turn
        prompt = self._waiting.get(0.0, flow=turn.flow if turn.num_left else None)
        assert prompt is not None, "the queue is used by one thread"
        flow = _flow(prompt)
        is_continued = turn.num_left > 0 and flow == turn.flow
        self._turn = _Turn(flow, turn.num_left - 1) if is_continued else _Turn(flow, num_steps=0)
        return prompt

    def _start_loading(self) -> Future[Any]:
        if self._loading is None:
            self._loading = load_on_thread(self._load)
        return self._loading


def _prefix(prompt: EngineRequest) -> Prefix:
    pooling = prompt.pooling
    return pooling.cache_salt, *prompt.ids[: pooling.num_shared]


def _flow(prompt: EngineRequest) -> Hashable:
    """Return what a prompt has in common with the prompts of its turn: a shared prefix, or nothing."""
    parameters = prompt.parameters
    is_shared = isinstance(parameters, Pooling) and parameters.num_shared > 0
    return _prefix(prompt) if is_shared else prompt.key


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
        self._inputs: frozenset[str] = frozenset()
        self._prefixes = PrefixStates()

    def check(self, num_tops: int) -> None:
        if self._inputs:
            return
        import openvino

        inputs = frozenset(port.any_name for port in openvino.Core().read_model(self._model / MODEL).inputs)
        if unknown := inputs - {"input_ids", "attention_mask", "position_ids", "beam_idx"}:
            raise ValueError(f"prompts cannot be scored: the model has unknown inputs: {', '.join(sorted(unknown))}")
        self._inputs = inputs

    def _load(self) -> LogitModel:
        import openvino

        return LogitModel(openvino.Core().read_model(self._model / MODEL), self._properties)

    def _score(self, model: LogitModel, prompt: EngineRequest) -> Work:
        return self._labels(model, prompt) if isinstance(prompt.parameters, Pooling) else self._prompt(model, prompt)

    def _labels(self, model: LogitModel, prompt: EngineRequest) -> Work:
        """Compute the log-probabilities of labels. The prefix that requests share is computed only once.

        A request with a prefix that is not stored takes the same two parts, so its numbers are the same.
        """
        ids, num_shared, prefix = prompt.ids, prompt.pooling.num_shared, _prefix(prompt)
        states = self._prefixes.get(prefix)
        if states is None:
            states = model.empty
            for start, end in _parts(0, num_shared):
                model.infer(ids[start:end], start, [0], states)
                states = model.states()
                yield None
            if num_shared:
                self._prefixes.put(prefix, states)
        row: Any = ()
        for start, end in _parts(num_shared, len(ids)):
            row = model.infer(ids[start:end], start, [end - start - 1], states)[-1]
            if end < len(ids):
                states = model.states()
                yield None
        yield Scores(prompt.key, score_labels(row, prompt.pooling.label_ids))

    def _prompt(self, model: LogitModel, prompt: EngineRequest) -> Work:
        states: States = model.empty
        num_tops, last = prompt.sampling.prompt_top_logprobs, len(prompt.ids) - 1
        logprobs: list[float | None] = [None]
        tops: list[Alternatives] = [()]
        for start, end in _parts(0, last):
            rows = model.infer(prompt.ids[start:end], start, range(end - start), states)
            part_logprobs, part_tops = score(rows, prompt.ids[start + 1 : end + 1], num_tops)
            logprobs += part_logprobs
            tops += part_tops
            if end < last:
                states = model.states()
                yield None
        yield Scores(prompt.key, logprobs, tops if num_tops else None)


def _parts(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Divide a range of tokens into the ranges of the steps."""
    for first in range(start, end, _TOKENS_PER_STEP):
        yield first, min(first + _TOKENS_PER_STEP, end)


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

    def check(self, num_tops: int) -> None:
        if num_tops:
            raise ValueError(NO_TOPS)

    def _load(self) -> Any:
        return self._make_pipeline()

    def _score(self, model: Any, prompt: EngineRequest) -> Work:
        if isinstance(prompt.parameters, Pooling):
            yield from self._labels(model, prompt)
        else:
            # The first number is a placeholder, and the last belongs to the generated token.
            numbers = yield from self._echo(model, prompt.key, prompt.ids)
            yield Scores(prompt.key, [None, *numbers[1:-1]])

    def _labels(self, model: Any, prompt: EngineRequest) -> Work:
        """Compute the log-probabilities of labels, each as the last token of a prompt."""
        numbers = list[float]()
        for id in prompt.pooling.label_ids:
            echoed = yield from self._echo(model, prompt.key, [*prompt.ids, id])
            numbers.append(echoed[-2])
        echoed = yield from self._echo(model, prompt.key, prompt.ids)  # greedy decoding chooses the most likely token
        yield Scores(prompt.key, [*numbers, echoed[-1]])

    def _echo(self, pipeline: Any, key: int, ids: Sequence[int]) -> Generator[None, None, list[float]]:
        """Return the log-probabilities of a prompt and of the token that follows it."""
        import numpy
        import openvino
        import openvino_genai

        tensor = openvino.Tensor(numpy.array([ids], dtype=numpy.int64))
        config = openvino_genai.GenerationConfig(max_new_tokens=1, logprobs=1, echo=True, ignore_eos=True)
        handle = pipeline.add_request(key, tensor, config)
        logprobs: list[float] = []
        try:
            while True:
                pipeline.step()
                while handle.can_read():
                    for output in handle.read().values():
                        logprobs += output.generated_log_probs
                if not pipeline.has_non_finished_requests():
                    return logprobs
                yield None
        except GeneratorExit:
            handle.cancel()
            pipeline.step()
            raise
