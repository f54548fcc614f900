"""Prometheus metrics of the server, served at /metrics.

The metrics have few labels, because SageMaker creates a CloudWatch metric for each combination of label values.
"""

from __future__ import annotations

import threading
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import Metric

from handler.serving.metrics.decisions import DecisionMetrics
from handler.serving.metrics.ended import Ended, EndedRequest
from handler.serving.metrics.families import histograms
from handler.serving.metrics.gauges import AdapterGauges, CapturedRequests, Gauges
from handler.serving.metrics.request_stats import RequestCounter
from handler.serving.metrics.tgi import TgiMetrics
from handler.serving.metrics.tracing import Tracer
from handler.serving.metrics.vllm import FIRST_TOKEN_TEXT, VllmMetrics

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


class _Registry(CollectorRegistry):
    """A registry that calls `update` before its metrics are collected."""

    def __init__(self, update: Callable[[], object]) -> None:
        super().__init__()
        self._update_metrics = update

    def collect(self) -> Iterable[Metric]:
        self._update_metrics()
        return super().collect()


class _Counters:
    """Counters of the requests that have ended, and of their prompt tokens."""

    def __init__(self, registry: CollectorRegistry) -> None:
        requests = Counter("lmi_requests", "Requests by outcome", ["outcome"], registry=registry)
        self._by_outcome = {outcome: requests.labels(outcome) for outcome in OUTCOMES}
        self._prompt_tokens = Counter("lmi_prompt_tokens", "Prompt tokens accepted", registry=registry)

    def count(self, ended: Sequence[EndedRequest]) -> None:
        for outcome, number in Counts(request.outcome for request in ended).items():
            self._by_outcome[outcome].inc(number)
        self._prompt_tokens.inc(sum([request.num_prompt_tokens for request in ended]))


class Metrics(RequestCounter):
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
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, model_name: str, gauges: Gauges, *, tgi: bool = False, tracer: Tracer | None = None) -> None:
        super().__init__()
        self._tracer = tracer
        self._ended = Ended()
        self._updating = threading.Lock()
        if tracer is not None:
            self.recorders.append(tracer.record)
        self.registry = registry = _Registry(self.update)
        self._counters = _Counters(registry)
        registry.register(gauges)
        self.websockets = Gauge("lmi_websockets", "Open WebSockets of the embedded server", registry=registry)
        self.ready = Gauge("lmi_engine_ready", "1 while the engine can serve", registry=registry)
        queued = Gauge("lmi_queued_requests", "Requests waiting for the engine", registry=registry)
        queued.set_function(gauges.queued)
        active = Gauge("lmi_active_sequences", "Sequences in the engine", registry=registry)
        active.set_function(gauges.active)
        self._histograms = histograms("lmi_", registry, {}, _OWN)
        self._decisions: DecisionMetrics | None = None  # until the first decision
        self._adapters = AdapterGauges(gauges.adapters)
        registry.register(self._adapters)
        self._vllm = VllmMetrics(registry, model_name, gauges)
        self._tgi = TgiMetrics(registry, gauges.queued, gauges.active) if tgi else None

    def show_captured(self, counts: Callable[[], tuple[int, int]]) -> None:
        """Export the numbers of captured requests.

        Args:
            counts: function that returns the numbers of written and dropped requests.
        """
        self.registry.register(CapturedRequests(counts))

    @property
    def ended(self) -> Ended:
        """Counts and durations of finished requests for Triton's statistics."""
        self.update()
        return self._ended

    def update(self) -> None:
        """Count the requests that have ended, and the first tokens, since the last update."""
        with self._updating:
            firsts = self._take_firsts()
            self._histograms["time_to_first_token_seconds"].observe_all(firsts)
            self._vllm.first_token.observe_all(firsts)
            self._count_ended(self._take_uncounted())

    def _count_ended(self, ended: Sequence[EndedRequest]) -> None:
        self._counters.count(ended)
        reached = [request for request in ended if request.queue is not None]
        self._ended.count(reached)
        admitted = [request.total for request in reached if request.outcome not in _NOT_ADMITTED]
        self._histograms["request_duration_seconds"].observe_all(admitted)
        several = [request for request in ended if request.num_tokens > 1]
        per_token = [(request.total - request.first) / (request.num_tokens - 1) for request in several]
        self._histograms["time_per_output_token_seconds"].observe_all(per_token)
        self._vllm.count(ended)
        if decisions := [request for request in reached if request.num_questions]:
            self._decisions = self._decisions or DecisionMetrics(self.registry)
            self._decisions.count(decisions)
        self._adapters.num_requests.update(name for request in ended for name in request.adapters)
        if self._tgi is not None:
            self._tgi.count(ended)

    def render(self) -> bytes:
        text = generate_latest(self.registry)
        return text if self._tgi is None else text + self._tgi.counters(self.num_opened)

    def close(self) -> None:
        """Send the remaining spans."""
        if self._tracer is not None:
            self._tracer.close()
