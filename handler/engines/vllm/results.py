"""Turns the results of vLLM's core into outputs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from handler.core.values import Extras, Finish
from handler.engines.base import Alternatives, EngineStatistics, Output, Step


@dataclass
class Pending:
    """A request in vLLM, also for a beam's next token.

    Attributes:
        key: the caller's.
        stops: ids that end it as STOP, not as EOS.
        num_tops: number of alternatives to each token.
        prompt_logprobs: the prompt's, as far as they have come; None for a request without them.
        num_prompt_tops: number of alternatives to each of the prompt's tokens.
        prompt_tops: alternatives to the prompt's tokens, as far as they have come.
        beam: number of the beam that it continues.
        id: vLLM's own, once it has the request.
        begun: an output of it has come.
        plain: only the chosen token comes with each step.
    """

    key: int
    stops: frozenset[int] = frozenset()
    num_tops: int = 0
    prompt_logprobs: list[float | None] | None = None
    num_prompt_tops: int = 0
    beam: int | None = None
    id: str = ""
    begun: bool = False
    prompt_tops: list[Alternatives] = field(init=False, default_factory=lambda: [()])
    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        self.plain = not self.num_tops and self.prompt_logprobs is None and self.beam is None

    def take_prompt_scores(self) -> tuple[list[float | None] | None, list[Alternatives] | None]:
        """Return the prompt's log-probabilities and alternatives; only once."""
        scores = self.prompt_logprobs, self.prompt_tops if self.num_prompt_tops else None
        self.prompt_logprobs, self.num_prompt_tops = None, 0
        self.__post_init__()
        return scores


class BeamToken(NamedTuple):
    """The alternatives after a beam, the most likely first; or an error."""

    pending: Pending
    alternatives: Alternatives
    error: str | None


_PREEMPTED = 3  # EngineCoreEventType.PREEMPTED in vllm/v1/engine/__init__.py
_SPOILT = "its scores are no longer numbers"  # later requests share its cache, and would get the same


class Results:
    """Replaces LLMEngine's OutputProcessor (vLLM 0.20 to 0.33); `Vllm.step` calls `read`.

    vLLM's own makes objects, texts and statistics for every token, which are not used here, at four times the cost.
    """

    def __init__(self) -> None:
        self.pending: dict[str, Pending] = {}
        self.next = Pending(0)  # the request that LLMEngine adds next
        self.num_preemptions = 0

    def add_request(self, request: Any, *prompt_parent_and_index: Any) -> None:
        self.next.id = request.request_id
        self.pending[request.request_id] = self.next

    def abort_requests(self, request_ids: Collection[str], internal: bool) -> list[str]:
        return [id for id in request_ids if self.pending.pop(id, None) is not None]

    def read(self, outputs: Iterable[Any]) -> tuple[Step, list[BeamToken]]:
        """Read a step; the hot path: one token for each of many requests."""
        keys: list[int] = []
        ids: list[int] = []
        logprobs: list[float | None] = []
        others: list[Output] = []
        beams: list[BeamToken] = []
        for output in outputs:
            if output.events:  # hardly ever
                self.num_preemptions += sum(event.type == _PREEMPTED for event in output.events)
            pending = self.pending.get(output.request_id)
            if pending is None:  # cancelled
                continue
            tokens, finish = output.new_token_ids, output.finish_reason
            cached = None if pending.begun else _take_cached(pending, output)
            if pending.plain and finish is None and len(tokens) == 1 and not cached:  # nearly every one
                keys.append(pending.key)
                ids.append(tokens[0])
                scores = output.new_logprobs
                logprob = None if scores is None else float(scores.logprobs[0, 0])
                if logprob != logprob:
                    raise RuntimeError(_SPOILT)
                logprobs.append(logprob)
                continue
            if finish is not None:
                del self.pending[output.request_id]
            if pending.beam is not None:
                if finish is not None:
                    beams.append(_beam_token(pending, output))
            elif (result := _output(pending, output, cached)) is not None:
                others.append(result)
        return Step(keys, ids, logprobs, others), beams


def _take_cached(pending: Pending, output: Any) -> int:
    """Return how many tokens of a request's prompt were in the prefix cache, as its first output says.

    The field is `num_cached_tokens` in the oldest versions, later in `prefill_stats` (vllm/v1/engine/__init__.py).
    """
    pending.begun = True
    stats = getattr(output, "prefill_stats", None) or output
    cached: int = getattr(stats, "num_cached_tokens", 0)
    return cached


def _output(pending: Pending, output: Any, cached: int | None) -> Output | None:
    if pending.prompt_logprobs is not None and (scores := output.new_prompt_logprobs_tensors) is not None:
        pending.prompt_logprobs += scores.logprobs[:, 0].tolist()  # a part of a long prompt; column 0 has its own ids
        if pending.num_prompt_tops:
            pending.prompt_tops += _tops(scores, pending.num_prompt_tops)
    ids = list(output.new_token_ids)
    finish = _finish(output, pending.stops)
    if finish is Finish.ERROR:
        why = "perhaps its schema or grammar, or what it forbids, left no token"
        return Output(pending.key, (), (), finish, error=f"vLLM ended it as {output.finish_reason!s}; {why}")
    if not ids and finish is None:
        return None
    scores = output.new_logprobs
    prompt_logprobs, prompt_tops = pending.take_prompt_scores()
    return Output(
        pending.key,
        ids,
        [None] * len(ids) if scores is None else scores.logprobs[:, 0].tolist(),
        finish,
        prompt_logprobs=prompt_logprobs,
        tops=_tops(scores, pending.num_tops) if pending.num_tops else None,
        prompt_tops=prompt_tops,
        extras=Extras(num_cached_tokens=cached) if cached else None,
    )


def _beam_token(pending: Pending, output: Any) -> BeamToken:
    if _finish(output, frozenset()) is Finish.ERROR:
        return BeamToken(pending, (), f"vLLM ended a beam as {output.finish_reason!s}")
    return BeamToken(pending, _tops(output.new_logprobs, pending.num_tops)[0], None)


def _tops(scores: Any, count: int) -> list[list[tuple[int, float]]]:
    """Return the most likely ids at each position; column 0 has the chosen one, whatever its rank."""
    ids, logprobs = scores.logprob_token_ids[:, 1 : count + 1], scores.logprobs[:, 1 : count + 1]
    return [list(zip(*row, strict=True)) for row in zip(ids.tolist(), logprobs.tolist(), strict=True)]


def _finish(output: Any, stops: frozenset[int]) -> Finish | None:
    if output.finish_reason is None:
        return None
    match str(output.finish_reason):
        case "length":
            return Finish.LENGTH
        case "stop":
            return Finish.STOP if output.new_token_ids and output.new_token_ids[-1] in stops else Finish.EOS
        case _:
            return Finish.ERROR


# -- statistics that vLLM's scheduler sends with each step (SchedulerStats in vllm/v1/metrics/stats.py) ----------------


class Statistics:
    """Those of vLLM 0.20 to 0.33; without any while `disable_log_stats` is true."""

    def __init__(self) -> None:
        self._last: Any = None
        self._queries = 0
        self._hits = 0

    def add(self, stats: Any) -> None:
        """Take a step's: the scheduler's present state, and the prefix cache's lookups since the step before."""
        self._last = stats
        cache = stats.prefix_cache_stats
        if cache is not None and cache.queries:
            self._queries += cache.queries
            self._hits += cache.hits

    def report(self, *, idle: bool, num_preemptions: int = 0) -> EngineStatistics:
        """Return the present ones.

        Args:
            idle: it has no requests: no step says so after the last one was cancelled.
            num_preemptions: so far.
        """
        last = self._last
        if last is None:
            return EngineStatistics()
        waiting = (
            0 if idle else last.num_waiting_reqs + getattr(last, "num_skipped_waiting_reqs", 0)
        )  # not in each of them
        usage = 0.0 if idle else last.kv_cache_usage
        return EngineStatistics(waiting, usage, self._queries, self._hits, num_preemptions)
