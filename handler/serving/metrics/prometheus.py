"""Prometheus metrics of the server, served at /metrics.

The metrics have few labels, because SageMaker creates a CloudWatch metric for each combination of label values.
"""

from __future__ import annotations

import threading
from collections import Counter as Counts
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import Metric

from handler.core.values import Request
from handler.serving.metrics.ended import Ended, EndedRequest
from handler.serving.metrics.families import histograms
from handler.serving.metrics.gauges import Adapters, CapturedRequests, Gauges
from handler.serving.metrics.tgi import TgiMetrics
from handler.serving.metrics.tracing import RequestRecord, Tracer
from handler.serving.metrics.vllm import FIRST_TOKEN_TEXT, VllmMetrics

T = TypeVar("T")

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
_DURATION_TEXT = "Seconds from a request's acceptance to its last token, without refused requests"
_OWN = (
    ("time_to_first_token_seconds", FIRST_TOKEN_TEXT, _SECONDS),
    ("time_per_output_token_seconds", "Mean seconds between a request's tokens after the first", _TOKEN_SECONDS),
    ("request_duration_seconds", _DURATION_TEXT, _SECONDS),
)

OUTCOMES = ("ok", "refused", "overloaded", "unavailable", "failed", "cancelled")
_NOT_ADMITTED = ("refused", "overloaded", "unavailable")
_MAX_UNCOUNTED = 256  # number of ended requests at which they are counted, although nobody reads the metrics


class _Registry(CollectorRegistry):
    """A registry that calls `update` before its metrics are collected."""

    def __init__(self, update: Callable[[], object]) -> None:
        super().__init__()
        self._update_metrics = update

    def collect(self) -> Iterable[Metric]:
        self._update_metrics()
        return super().collect()


class Metrics:
    """The metrics of a server. Each server has its own registry, so that several servers in one process (as in tests)
    do not conflict.

    Requests that have ended are counted when the metrics are read, because counting many at once costs less. The
    registry may be collected on any thread.

    Args:
        model_name: value of the label `model_name` in vLLM's metrics.
        gauges: functions that return current values.
        tgi: whether to export TGI's metrics too.
        tracer: tracer that records each request, or None without tracing.

    Attributes:
        registry: registry of all metrics except TGI's counters.
        recorders: functions that are called with the record of each request that has ended.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, model_name: str, gauges: Gauges, *, tgi: bool = False, tracer: Tracer | None = None) -> None:
        self._tracer = tracer
        self._ended = Ended()
        self._uncounted = deque[EndedRequest]()
        self._uncounted_firsts = deque[float]()
        self._updating = threading.Lock()
        self.recorders: list[Callable[[RequestRecord], object]] = [] if tracer is None else [tracer.record]
        self.registry = registry = _Registry(self._update)
        requests = Counter("lmi_requests", "Requests by outcome", ["outcome"], registry=registry)
        self._by_outcome = {outcome: requests.labels(outcome) for outcome in OUTCOMES}
        self._prompt_tokens = Counter("lmi_prompt_tokens", "Prompt tokens accepted", registry=registry)
        registry.register(gauges)
        self.ready = Gauge("lmi_engine_ready", "1 while the engine can serve", registry=registry)
        queued = Gauge("lmi_queued_requests", "Requests waiting for the engine", registry=registry)
        queued.set_function(gauges.queued)
        active = Gauge("lmi_active_sequences", "Sequences in the engine", registry=registry)
        active.set_function(gauges.active)
        self._histograms = histograms("lmi_", registry, {}, _OWN)
        self._adapters = Adapters(gauges.adapters)
        registry.register(self._adapters)
        self._vllm = VllmMetrics(registry, model_name, gauges)
        self._tgi = TgiMetrics(registry, gauges.queued, gauges.active) if tgi else None

    def show_captured(self, counts: Callable[[], tuple[int, int]]) -> None:
        """Export the numbers of captured requests.

        Args:
            counts: function that returns the numbers of written and dropped requests.
        """
        self.registry.register(CapturedRequests(counts))

    def count_opened(self) -> None:
        """Count a request that TGI would count: it is accepted, or refused for a parameter or as unavailable."""
        if self._tgi is not None:
            self._tgi.count_opened()

    def count_first(self, seconds: float) -> None:
        """Count the first token of a request, `seconds` after its acceptance."""
        self._uncounted_firsts.append(seconds)

    def count(self, request: RequestRecord, parsed: Sequence[Request] = (), *, opened: bool = True) -> None:
        """Count a request that has ended, and pass it to the recorders.

        As in vLLM, TGI and DJL Serving, durations exclude requests that were refused or did not need the engine, such
        as /tokenize. Their short durations would hide the long durations on an overloaded server.

        Args:
            parsed: the prompts of the request, with their parameters.
            opened: whether `count_opened` has counted the request.
        """
        self._uncounted.append(EndedRequest.of(request, parsed, opened=opened))
        if len(self._uncounted) >= _MAX_UNCOUNTED:
            self._update()
        for note in self.recorders:
            note(request)

    @property
    def ended(self) -> Ended:
        """Counts and durations of finished requests for Triton's statistics."""
        self._update()
        return self._ended

    def _update(self) -> None:
        """Count the requests that have ended, and the first tokens, since the last update."""
        with self._updating:
            firsts = _taken(self._uncounted_firsts)
            self._histograms["time_to_first_token_seconds"].observe_all(firsts)
            self._vllm.first_token.observe_all(firsts)
            self._count_ended(_taken(self._uncounted))

    def _count_ended(self, ended: Sequence[EndedRequest]) -> None:
        for outcome, number in Counts(one.outcome for one in ended).items():
            self._by_outcome[outcome].inc(number)
        self._prompt_tokens.inc(sum(one.num_prompt_tokens for one in ended))
        reached = [one for one in ended if one.queue is not None]
        self._ended.count(reached)
        admitted = (one.total for one in reached if one.outcome not in _NOT_ADMITTED)
        self._histograms["request_duration_seconds"].observe_all(admitted)
        several = [one for one in ended if one.num_tokens > 1]
        per_token = ((one.total - one.first) / (one.num_tokens - 1) for one in several)
        self._histograms["time_per_output_token_seconds"].observe_all(per_token)
        self._vllm.count(ended)
        self._adapters.num_requests.update(name for one in ended for name in one.adapters)
        if self._tgi is not None:
            self._tgi.count(ended)

    def render(self) -> bytes:
        own = generate_latest(self.registry)
        return own if self._tgi is None else own + self._tgi.counters()

    def close(self) -> None:
        """Send the remaining spans."""
        if self._tracer is not None:
            self._tracer.close()


def _taken(queue: deque[T]) -> list[T]:
    """Remove and return all items of a queue to which another thread may be adding."""
    return [queue.popleft() for _ in range(len(queue))]
