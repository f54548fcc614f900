"""Prometheus metrics of a server, served at /metrics.

Labels are few: SageMaker turns each combination into a CloudWatch metric.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from handler.core.values import Finish
from handler.engines.base import EngineStatistics
from handler.engines.process.replica import ReplicaReport
from handler.serving.metrics.histogram import Histogram
from handler.serving.metrics.tgi import TgiMetrics
from handler.serving.metrics.tracing import RequestRecord, Tracer
from handler.serving.metrics.vllm import VllmMetrics

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)

_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
REPLICA_FAMILIES: tuple[tuple[_Family, str, str, Callable[[ReplicaReport], float]], ...] = (
    (GaugeMetricFamily, "ready", "1 while the replica can serve", lambda replica: replica.ready),
    (GaugeMetricFamily, "active_sequences", "Sequences in the replica", lambda replica: replica.num_active),
    (CounterMetricFamily, "requests", "Requests that the replica got", lambda replica: replica.num_requests),
    (CounterMetricFamily, "generated_tokens", "Tokens that it generated", lambda replica: replica.num_tokens),
    (CounterMetricFamily, "restarts", "Times that it was lost and started again", lambda replica: replica.restarts),
)
"""Metrics of each replica, where there are several."""

OUTCOMES = ("ok", "refused", "overloaded", "failed", "cancelled")


@dataclass(frozen=True)
class Gauges:
    """Functions that return a current value; they are called at each look at the metrics.

    Attributes:
        queued: requests that wait for the engine.
        active: the engine's requests.
        tokens: tokens generated so far.
        restarts: engines that were lost and started again.
        statistics: the engine's own report; None while it has made none.
        replicas: a report on each engine, where there are several.
        adapters: names of the registered LoRA adapters.
    """

    queued: Callable[[], int]
    active: Callable[[], int]
    tokens: Callable[[], int]
    restarts: Callable[[], int]
    statistics: Callable[[], EngineStatistics | None]
    replicas: Callable[[], Sequence[ReplicaReport]]
    adapters: Callable[[], Sequence[str]] = tuple

    def engines(self) -> list[tuple[int, EngineStatistics]]:
        """Return the sequences and the report of each engine."""
        found = [(replica.num_active, replica.statistics) for replica in self.replicas()]
        found = found or [(self.active(), self.statistics())]
        return [(num_active, statistics or EngineStatistics()) for num_active, statistics in found]


class _Totals(Collector):
    """Asked when somebody looks: a Counter would have to be told at every step, at the price of a token."""

    def __init__(self, gauges: Gauges) -> None:
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("lmi_generated_tokens", "Tokens generated", value=self._gauges.tokens())
        text = "Engines lost and started again"
        yield CounterMetricFamily("lmi_engine_restarts", text, value=self._gauges.restarts())
        replicas = self._gauges.replicas()
        for kind, name, text, value in REPLICA_FAMILIES if replicas else ():
            family = kind(f"lmi_replica_{name}", text, labels=["replica"])
            for replica in replicas:
                family.add_metric([str(replica.number)], value(replica))
            yield family


class _Adapters(Collector):
    """The registered LoRA adapters and their requests; nothing where there is none. One that is gone is forgotten."""

    def __init__(self, names: Callable[[], Sequence[str]]) -> None:
        self._names = names
        self.num_requests: Counts[str] = Counts()

    def collect(self) -> Iterator[Metric]:
        if not (names := self._names()):
            return
        for gone in {*self.num_requests} - {*names}:
            self.num_requests.pop(gone, None)  # two may look at a time
        yield GaugeMetricFamily("lmi_adapters", "LoRA adapters that are registered", value=len(names))
        family = CounterMetricFamily("lmi_adapter_requests", "Requests with a LoRA adapter", labels=["adapter"])
        for name in names:
            family.add_metric([name], self.num_requests[name])
        yield family


class _Captured(Collector):
    """The requests of option.capture_requests."""

    def __init__(self, counts: Callable[[], tuple[int, int]]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        text = "Requests of option.capture_requests by outcome: written, or dropped as the disk was slow or full"
        family = CounterMetricFamily("lmi_captured_requests", text, labels=["outcome"])
        for outcome, count in zip(("written", "dropped"), self._counts(), strict=True):
            family.add_metric([outcome], count)
        yield family


class Metrics:
    """One registry a server, so that two servers in one process (tests) do not meet.

    Args:
        model_name: the label of vLLM's metrics.
        tgi: export TGI's metrics too.
        tracer: gets a span for each request.

    Attributes:
        recorders: called with each request that has ended.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, model_name: str, gauges: Gauges, *, tgi: bool = False, tracer: Tracer | None = None) -> None:
        self._tracer = tracer
        self.recorders: list[Callable[[RequestRecord], object]] = [] if tracer is None else [tracer.record]
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("lmi_requests", "Requests by outcome", ["outcome"], registry=registry)
        self._by_outcome = {outcome: self.requests.labels(outcome) for outcome in OUTCOMES}
        self.prompt_tokens = Counter("lmi_prompt_tokens", "Prompt tokens accepted", registry=registry)
        registry.register(_Totals(gauges))
        self.ready = Gauge("lmi_engine_ready", "1 while the engine can serve", registry=registry)
        queued = Gauge("lmi_queued_requests", "Requests waiting for the engine", registry=registry)
        queued.set_function(gauges.queued)
        active = Gauge("lmi_active_sequences", "Sequences in the engine", registry=registry)
        active.set_function(gauges.active)
        self.first_token = Histogram(
            "lmi_time_to_first_token_seconds",
            "From a request's acceptance to its first token",
            _SECONDS,
            registry,
        )
        self.per_token = Histogram(
            "lmi_time_per_output_token_seconds",
            "Mean time between a request's tokens after the first",
            _TOKEN_SECONDS,
            registry,
        )
        self.duration = Histogram(
            "lmi_request_duration_seconds",
            "From a request's acceptance to its last token",
            _SECONDS,
            registry,
        )
        self._adapters = _Adapters(gauges.adapters)
        registry.register(self._adapters)
        self._vllm = VllmMetrics(registry, model_name, gauges.queued, gauges.engines)
        self._tgi = TgiMetrics(registry, gauges.queued, gauges.active) if tgi else None

    def show_captured(self, counts: Callable[[], tuple[int, int]]) -> None:
        """Export how many requests are captured: written, dropped."""
        self.registry.register(_Captured(counts))

    def count_opened(self) -> None:
        """Count a request that has come; its outcome is not known yet."""
        if self._tgi is not None:
            self._tgi.count_opened()

    def count_first(self, seconds: float) -> None:
        """Count the first token of a request, `seconds` after its acceptance."""
        self.first_token.observe(seconds)
        self._vllm.first_token.observe(seconds)

    def count(
        self,
        outcome: str,
        seconds: float,
        first: float,
        num_prompt_tokens: int,
        num_tokens: int,
        num_sequences: int,
        *,
        queue: float | None = None,
        finish: Finish | None = None,
        adapters: Iterable[str] = (),
    ) -> None:
        """Count a request that has ended.

        Args:
            seconds: from its acceptance to its end.
            first: from its acceptance to its first token, if any.
            queue: seconds that it waited for the engine; None: it never reached it.
            finish: why the last sequence ended.
            adapters: names of the LoRA adapters of its prompts.
        """
        self._by_outcome[outcome].inc()
        self.duration.observe(seconds)
        self.prompt_tokens.inc(num_prompt_tokens)
        if num_tokens > 1:
            self.per_token.observe((seconds - first) / (num_tokens - 1))
        if (later := num_tokens - num_sequences) > 0:
            self._vllm.inter_token.observe((seconds - first) * num_sequences / later, later)
        if queue is not None:
            self._vllm.count(outcome, finish, queue, num_prompt_tokens, num_tokens)
        self._adapters.num_requests.update(adapters)
        if self._tgi is not None and outcome == "ok":
            self._tgi.count_success(seconds)

    def render(self) -> bytes:
        own = generate_latest(self.registry)
        return own if self._tgi is None else own + self._tgi.counters()

    def close(self) -> None:
        """Send the spans that wait."""
        if self._tracer is not None:
            self._tracer.close()
