"""An engine wrapper that reads the log-probabilities of labels from the responses to ordinary requests."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container

from handler.core.values import Extras, Finish, Pooling, Sampling
from handler.engines.base import EngineRequest, Output, Step
from handler.scheduler.engine import EngineWrapper, SteppedEngine, read_some

MAX_TOPS = 20
"""Maximum number of alternatives that servers such as vLLM allow by default."""

_HIGHEST_OTHER = math.log(0.5) + 1e-3
"""Highest log-probability of a token that is not the most likely one, with a tolerance."""


class LabelEngine(EngineWrapper):
    """A `SteppedEngine` that accepts requests for labels, and sends ordinary requests instead.

    The first of these requests asks for the alternatives to the next token. Each label that is not among them needs
    another request. If the engine scores prompts, the label is scored as the last token of a prompt. Otherwise, the
    label is the only token that the engine may generate, and its log-probability is that before this limit. All other
    requests are passed to the engine unchanged.

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
        self._reads_any = self._scores or "allowed_token_ids" not in unsupported
        self._requests: dict[int, _LabelRequest] = {}

    def add(self, request: EngineRequest) -> None:
        if not isinstance(request.parameters, Pooling) or not request.parameters.labels:
            return self._engine.add(request)
        labels = self._requests[request.key] = _LabelRequest(request, self._num_tops, self._scores)
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
        return [read_some(step, self._requests, self._take) for step in steps] if self._requests else steps

    def _take(self, output: Output, others: list[Output]) -> None:
        """Process the output of a request for labels."""
        if (ended := self._advance(self._requests[output.key], output)) is not None:
            del self._requests[output.key]
            others.append(ended)

    def _advance(self, labels: _LabelRequest, output: Output) -> Output | None:
        """Read an output. Return the output that ends the request for labels, or None if it continues."""
        if output.refused and labels.highest is None and labels.num_tops and self._reads_any:
            labels.num_tops = 0  # the operator of the server may have limited the alternatives
        elif output.finish is Finish.ERROR:
            return output
        else:
            labels.take(output)
            if output.finish is None:
                return None
            self._num_tops = labels.num_tops
            if (ended := self._end(labels, output.key)) is not None:
                return ended
        if not self._engine.continues(output.key):
            return Output(output.key, finish=Finish.ERROR, error="the engine was restarted between two labels")
        self._engine.add(labels.next())
        return None

    def _end(self, labels: _LabelRequest, key: int) -> Output | None:
        """Return the output that ends a request for labels, or None if labels are missing and can still be read."""
        if labels.is_incomplete:
            return Output(key, finish=Finish.ERROR, error="the engine returned no log-probability")
        if labels.is_limited:
            return labels.refused(
                "the engine reports log-probabilities only after its limits on tokens; start vLLM with "
                "--logprobs-mode raw_logprobs"
            )
        if labels.missing and not self._reads_any:
            return labels.refused(
                f"the label {labels.next_label!r} is not among the {labels.num_tops} most likely tokens, and the "
                "engine does not report the probabilities of others"
            )
        return None if labels.missing else labels.output()


class _LabelRequest:
    """A request for labels, and what is known about them so far.

    Attributes:
        num_tops: number of alternatives that the first request asks for.
        missing: ids of the labels whose log-probabilities are not known yet.
        highest: highest log-probability of any token, or None if it is not known yet.
        is_limited: whether the engine reported a label's log-probability only among the allowed tokens.
    """

    def __init__(self, request: EngineRequest, num_tops: int, scores: bool) -> None:
        self._request = request
        self._scores = scores
        self._logprobs: dict[int, float] = {}
        self._read: int | None = None  # the label that the current request reads
        self.num_tops = num_tops
        self.missing = deque(request.pooling.label_ids)
        self.highest: float | None = None
        self._num_media_tokens: int | None = None
        self.is_limited = False

    @property
    def is_incomplete(self) -> bool:
        """Whether the current request has not returned the log-probability that it asks for."""
        return self.highest is None or (self._read is not None and self._read not in self._logprobs)

    @property
    def next_label(self) -> str:
        """The first label whose log-probability is not known yet."""
        pooling = self._request.pooling
        return pooling.labels[pooling.label_ids.index(self.missing[0])]

    def next(self) -> EngineRequest:
        """Return the next request to the engine: for the most likely tokens, and then for one label after another."""
        salt = self._request.pooling.cache_salt
        sampling = Sampling(max_new_tokens=1, cache_salt=salt, ignore_eos=True)
        if self.highest is None:
            return self._request._replace(parameters=sampling._replace(top_logprobs=self.num_tops))
        self._read = self.missing[0]
        if not self._scores:
            return self._request._replace(parameters=sampling._replace(allowed_token_ids=(self._read,)))
        ids = [*self._request.ids, self._read]
        return self._request._replace(ids=ids, parameters=sampling._replace(prompt_logprobs=True))

    def take(self, output: Output) -> None:
        if self._read is None:
            self._take_first(output)
        elif self._scores:
            if output.prompt_logprobs:
                self._logprobs[self._read] = _number(output.prompt_logprobs[-1])
        elif self._read in output.ids:
            logprob = output.logprobs[output.ids.index(self._read)]
            if logprob is not None:
                self._logprobs[self._read] = logprob
                self.is_limited = logprob > _HIGHEST_OTHER
        self.missing = deque(id for id in self._request.pooling.label_ids if id not in self._logprobs)

    def _take_first(self, output: Output) -> None:
        if output.extras is not None:
            self._num_media_tokens = output.extras.num_media_tokens
        if output.ids:
            chosen = zip(output.ids, output.logprobs, strict=True)
            known = [*chosen, *(output.tops[0] if output.tops else ())]
            self._logprobs |= {id: logprob for id, logprob in known if logprob is not None}
            self.highest = max(self._logprobs.values(), default=None)

    def output(self) -> Output:
        logprobs = [self._logprobs[id] for id in self._request.pooling.label_ids]
        assert self.highest is not None, "the first request has ended"
        extras = Extras(vector=[*logprobs, self.highest], num_media_tokens=self._num_media_tokens)
        return Output(self._request.key, finish=Finish.STOP, extras=extras)

    def refused(self, error: str) -> Output:
        return Output(self._request.key, finish=Finish.ERROR, error=error, refused=True)


def _number(logprob: float | None) -> float:
    return float("-inf") if logprob is None else logprob
