"""An engine wrapper that reads the log-probabilities of labels from the responses to ordinary requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Container

from handler.core.values import Extras, Finish, Pooling, Sampling
from handler.engines.base import EngineRequest, Output, Step
from handler.scheduler.engine import EngineWrapper, SteppedEngine

MAX_TOPS = 20
"""Maximum number of alternatives that servers such as vLLM allow by default."""


class LabelEngine(EngineWrapper):
    """A `SteppedEngine` that accepts requests for labels, and sends ordinary requests instead.

    The first of these requests asks for the alternatives to the next token. If a label is not among them, it is scored
    as the last token of a prompt, if the engine scores prompts. All other requests are passed to the engine unchanged.

    Args:
        engine: engine that runs the requests.
        unsupported: fields of Sampling that the engine does not support. It must support `top_logprobs` or
            `prompt_logprobs`.
        max_tops: maximum number of alternatives that the engine reports.
    """

    def __init__(self, engine: SteppedEngine, unsupported: Container[str], max_tops: float = MAX_TOPS) -> None:
        super().__init__(engine)
        self._num_tops = 0 if "top_logprobs" in unsupported else int(min(max_tops, MAX_TOPS))
        self._scores = "prompt_logprobs" not in unsupported
        self._requests: dict[int, _LabelRequest] = {}

    def add(self, request: EngineRequest) -> None:
        if not isinstance(request.parameters, Pooling) or not request.parameters.labels:
            return self._engine.add(request)
        labels = self._requests[request.key] = _LabelRequest(request, self._num_tops)
        self._engine.add(labels.next())

    def cancel(self, key: int) -> None:
        self._requests.pop(key, None)
        self._engine.cancel(key)

    def step(self, timeout: float = 0.0) -> list[Step]:
        try:
            steps = self._engine.step(timeout)
        except Exception:
            self._requests.clear()
            raise
        return [self._read(step) for step in steps] if self._requests else steps

    def _read(self, step: Step) -> Step:
        """Process the outputs of requests for labels. Return the step with all other outputs unchanged."""
        requests = self._requests
        if requests.keys().isdisjoint(step.keys) and not any(output.key in requests for output in step.others):
            return step
        result = Step.of([])
        for key, id, logprob in zip(step.keys, step.ids, step.logprobs, strict=True):
            if key in requests:
                requests[key].take(Output(key, (id,), (logprob,)))
            else:
                result.add(key, id, logprob)
        for output in step.others:
            if output.key not in requests:
                result.others.append(output)
            elif (ended := self._advance(requests[output.key], output)) is not None:
                del requests[output.key]
                result.others.append(ended)
        return result

    def _advance(self, labels: _LabelRequest, output: Output) -> Output | None:
        """Read an output. Return the output that ends the request for labels, or None if it continues."""
        if output.finish is Finish.ERROR:
            return output
        labels.take(output)
        if output.finish is None:
            return None
        if labels.is_unanswered:
            return Output(output.key, finish=Finish.ERROR, error="the engine returned no log-probability")
        if labels.missing and not self._scores:
            return labels.refusal(self._num_tops)
        if not labels.missing:
            return labels.output()
        if not self._engine.continues(output.key):
            return Output(output.key, finish=Finish.ERROR, error="the engine was restarted between two labels")
        self._engine.add(labels.next())
        return None


class _LabelRequest:
    """A request for labels, and what is known about them so far.

    Attributes:
        missing: ids of the labels whose log-probabilities are not known yet.
        highest: highest log-probability of any token, or None if it is not known yet.
    """

    def __init__(self, request: EngineRequest, num_tops: int) -> None:
        self._request = request
        self._num_tops = num_tops
        self._logprobs: dict[int, float] = {}
        self._scored: int | None = None  # the label that the current request scores
        self.missing = deque(request.pooling.label_ids)
        self.highest: float | None = None

    @property
    def is_unanswered(self) -> bool:
        """Whether the current request has not returned the log-probability that it asks for."""
        return self.highest is None or (self._scored is not None and self._scored not in self._logprobs)

    def next(self) -> EngineRequest:
        """Return the next request to the engine: for the most likely tokens, and then for one label after another."""
        salt = self._request.pooling.cache_salt
        sampling = Sampling(max_new_tokens=1, cache_salt=salt, ignore_eos=True)
        if self.highest is None:
            return self._request._replace(parameters=sampling._replace(top_logprobs=self._num_tops))
        self._scored = self.missing[0]
        ids = [*self._request.ids, self._scored]
        return self._request._replace(ids=ids, parameters=sampling._replace(prompt_logprobs=True))

    def take(self, output: Output) -> None:
        if self._scored is not None:
            if output.prompt_logprobs:
                self._logprobs[self._scored] = _number(output.prompt_logprobs[-1])
        elif output.ids:
            chosen = zip(output.ids, output.logprobs, strict=True)
            known = [*chosen, *(output.tops[0] if output.tops else ())]
            self._logprobs |= {id: logprob for id, logprob in known if logprob is not None}
            self.highest = max(self._logprobs.values(), default=None)
        self.missing = deque(id for id in self._request.pooling.label_ids if id not in self._logprobs)

    def output(self) -> Output:
        logprobs = [self._logprobs[id] for id in self._request.pooling.label_ids]
        assert self.highest is not None, "the first request has ended"
        return Output(self._request.key, finish=Finish.STOP, extras=Extras(vector=[*logprobs, self.highest]))

    def refusal(self, num_tops: int) -> Output:
        pooling = self._request.pooling
        label = pooling.labels[pooling.label_ids.index(self.missing[0])]
        error = (
            f"the label {label!r} is not among the {num_tops} most likely tokens, and the engine does not report the "
            "probabilities of others"
        )
        return Output(self._request.key, finish=Finish.ERROR, error=error, refused=True)


def _number(logprob: float | None) -> float:
    return float("-inf") if logprob is None else logprob
