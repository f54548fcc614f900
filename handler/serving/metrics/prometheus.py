"""Prometheus metrics of the server, served at /metrics.

The metrics have few labels, because SageMaker creates a CloudWatch metric for each combination of label values.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from handler.core.log import of_request
from handler.core.values import Finish, Request, Sampling
from handler.engines.base import EngineStatistics
from handler.engines.process.replicas import ReplicaReport
from handler.protocols.kernel.dialect import ParsedRequest, Timing
from handler.serving.metrics.tracing import RequestRecord, Tracer

log = logging.getLogger("handler.request")


class Histogram(Collector):
    """A histogram with a single set of label values. All observations must be made on the same thread.

    Args:
        bounds: upper bounds of the buckets in ascending order, without the final infinite bound.
        labels: values of the labels by name.
    """

    def __init__(
        self,
        name: str,
        help: str,
        bounds: Sequence[float],
        registry: CollectorRegistry,
        labels: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._name, self._help, self._labels = name, help, labels
        self._bounds = (*bounds, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        self._created = time.time()
        registry.register(self)

    def observe(self, value: float, count: int = 1) -> None:
        """Add a value to the histogram `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._help, labels=[*self._labels])
        counts = zip(map(floatToGoString, self._bounds), accumulate(self._counts), strict=True)
        family.add_metric([*self._labels.values()], [*counts], self._sum)
        family.add_sample(f"{self._name}_created", dict(self._labels), self._created)
        yield family


def _histograms(
    prefix: str,
    registry: CollectorRegistry,
    labels: Mapping[str, str],
    rows: Iterable[tuple[str, str, Sequence[float]]],
) -> dict[str, Histogram]:
    """Create histograms from rows that contain a name without the prefix, a help text and the bounds."""
    return {name: Histogram(prefix + name, help, bounds, registry, labels) for name, help, bounds in rows}


_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]


def _labelled(
    kind: _Family, name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """Create a metric from pairs of label values and metric value."""
    family = kind(name, text, labels=labels)
    for own, value in values:
        family.add_metric(own, value)
    return family


# -- metrics with vLLM's names, labels, units and buckets (vllm/v1/metrics/loggers.py and buckets.py, 0.33) ------------
# A value that the engine does not report is not exported.

_LABELS = ("model_name", "engine")
_FIRST = "0"  # vLLM numbers its engines like replicas; values of the whole server are reported for the first engine

_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0,
    2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_INTER_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_QUEUE = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_NUMBERS = (1.0, 2.0, 5.0, 10.0, 20.0)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

_FIRST_TOKEN_TEXT = "Seconds from a request's acceptance to its first token"
_VLLM = (
    ("inter_token_latency_seconds", "Mean seconds between a request's tokens, counted for each token", _INTER_TOKEN),
    ("request_queue_time_seconds", "Seconds from tokenizing a request to its start in the engine", _QUEUE),
    ("e2e_request_latency_seconds", "Seconds from a request's acceptance to its last token", _QUEUE),
    ("request_inference_time_seconds", "Seconds that a request spends in the engine", _QUEUE),
    ("request_prefill_time_seconds", "Seconds from the start in the engine to the first token", _QUEUE),
    ("request_decode_time_seconds", "Seconds from the first token to the last", _QUEUE),
    ("request_time_per_output_token_seconds", "Mean seconds between a request's tokens", _INTER_TOKEN),
    ("request_prompt_tokens", "Prompt tokens per request", _TOKENS),
    ("request_generation_tokens", "Generated tokens per request", _TOKENS),
    ("request_params_n", "Value of a request's parameter n", _NUMBERS),
    ("request_params_max_tokens", "Maximum number of new tokens per request", _TOKENS),
)

_REASONS = {"ok": "stop", "cancelled": "abort", "failed": "error"}
"""vLLM's `finished_reason` by outcome. It is `length` instead if a limit has cut off the response."""


class VllmMetrics(Collector):
    """Metrics with the same names as those of vLLM.

    Args:
        gauges: functions that return current values.

    Attributes:
        first_token: histogram of seconds from a request's acceptance to its first token.
        inter_token: histogram of seconds between tokens. Sum and count are exact. Each token is counted with the mean
            of its request, because measuring every token would cost too much.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, gauges: Gauges) -> None:
        self._model_name = model_name
        self._gauges = gauges
        self._num_prompt_tokens = 0
        labels = dict(zip(_LABELS, (model_name, _FIRST), strict=True))
        name = "vllm:time_to_first_token_seconds"
        self.first_token = Histogram(name, _FIRST_TOKEN_TEXT, _FIRST_TOKEN, registry, labels)
        registry.register(self)
        self._others = _histograms("vllm:", registry, labels, _VLLM)
        self.inter_token = self._others["inter_token_latency_seconds"]
        self._ended = dict.fromkeys(("stop", "length", "abort", "error"), 0)

    def count(self, request: RequestRecord, samplings: Iterable[Sampling], per_token: float | None) -> None:
        """Count a request that has ended, unless it never reached the engine.

        Args:
            samplings: the parameters of the request's prompts, if text is generated.
            per_token: mean time between tokens, in seconds, or None if no sequence has a second token.
        """
        if request.queue is None:
            return
        self._num_prompt_tokens += request.num_prompt_tokens
        histograms = self._others
        histograms["request_queue_time_seconds"].observe(request.queue)
        histograms["e2e_request_latency_seconds"].observe(request.total)
        histograms["request_inference_time_seconds"].observe(request.total - request.started)
        histograms["request_prompt_tokens"].observe(request.num_prompt_tokens)
        histograms["request_generation_tokens"].observe(request.num_tokens)
        if request.num_tokens:
            histograms["request_prefill_time_seconds"].observe(request.first - request.started)
            histograms["request_decode_time_seconds"].observe(request.total - request.first)
        if per_token is not None:
            histograms["request_time_per_output_token_seconds"].observe(per_token)
        for sampling in samplings:
            histograms["request_params_n"].observe(sampling.n)
            histograms["request_params_max_tokens"].observe(sampling.max_new_tokens)
        is_cut = request.outcome == "ok" and request.finish == Finish.LENGTH.value
        self._ended["length" if is_cut else _REASONS.get(request.outcome, "error")] += 1

    def collect(self) -> Iterator[Metric]:
        engines, gauge, counter = self._gauges.engines(), GaugeMetricFamily, CounterMetricFamily
        reports = [report for _, report in engines]
        yield from self._loads(engines)
        usage = [report.kv_cache_usage for report in reports]
        yield from self._family(gauge, "kv_cache_usage_perc", "Used fraction of the KV cache, 0 to 1", usage)
        hits = [report.prefix_cache_hits for report in reports]
        queries = [None if report.prefix_cache_hits is None else report.prefix_cache_queries for report in reports]
        yield from self._family(counter, "prefix_cache_queries", "Prompt tokens looked up in the prefix cache", queries)
        yield from self._family(counter, "prefix_cache_hits", "Prompt tokens found in the prefix cache", hits)
        preemptions = [report.num_preemptions for report in reports]
        text = "Requests preempted for lack of room in the KV cache"
        yield from self._family(counter, "num_preemptions", text, preemptions)
        text = "Prompt tokens of requests that have ended"
        yield from self._family(counter, "prompt_tokens", text, [self._num_prompt_tokens])
        yield from self._family(counter, "generation_tokens", "Tokens generated", [self._gauges.tokens()])
        ended = [((self._model_name, _FIRST, reason), count) for reason, count in self._ended.items()]
        labels = (*_LABELS, "finished_reason")
        yield _labelled(counter, "vllm:request_success", "Requests by finish reason", labels, ended)

    def _loads(self, engines: Sequence[tuple[int, EngineStatistics]]) -> Iterator[Metric]:
        """Yield the numbers of running and waiting requests."""
        gauge, text = GaugeMetricFamily, "Requests waiting in the queue, or for room in the engine"
        waiting = [min(report.num_waiting or 0, num) for num, report in engines]  # statistics may be a second old
        running = [num - waits for (num, _), waits in zip(engines, waiting, strict=True)]
        waiting[0] += self._gauges.queued()
        yield from self._family(gauge, "num_requests_running", "Sequences that the engine is computing", running)
        yield from self._family(gauge, "num_requests_waiting", text, waiting)

    def _family(self, kind: _Family, name: str, text: str, values: Iterable[float | None]) -> Iterator[Metric]:
        """Yield a metric with a value for each engine, unless no engine has a value."""
        known = [((self._model_name, str(number)), value) for number, value in enumerate(values) if value is not None]
        if known:
            yield _labelled(kind, f"vllm:{name}", text, _LABELS, known)


# -- metrics of Text Generation Inference that autoscalers read, with its types, units and buckets ---------------------
# Sources: docs/source/reference/metrics.md and router/src/server.rs of huggingface/text-generation-inference 3.

_DURATIONS = tuple(0.0001 * 1.5**power for power in range(1, 36))  # seconds
_TGI = (
    ("duration", "Duration of successful requests, in seconds", _DURATIONS),
    ("validation_duration", "Seconds from a request's acceptance to the check of its prompt's length", _DURATIONS),
    ("queue_duration", "Seconds in the queue", _DURATIONS),
    ("inference_duration", "Seconds in the engine", _DURATIONS),
    ("mean_time_per_token_duration", "Seconds in the engine per generated token", _DURATIONS),
    ("generated_tokens", "Generated tokens per request", _TOKENS),
    ("input_length", "Prompt tokens per request", _TOKENS),
    ("max_new_tokens", "Maximum number of new tokens per request", _TOKENS),
)
_TGI_ERRORS = {
    **dict.fromkeys(("overloaded", "unavailable"), "overloaded"),
    "refused": "validation",
    "failed": "generation",
    "cancelled": "dropped",
}
"""Value of TGI's label `err`, by outcome."""


class TgiMetrics:
    def __init__(self, registry: CollectorRegistry, queued: Callable[[], int], active: Callable[[], int]) -> None:
        self._num_opened = 0
        self._num_ok = 0
        self._failed: Counts[str] = Counts()
        Gauge("tgi_queue_size", "Current queue size", registry=registry).set_function(queued)
        Gauge("tgi_batch_current_size", "Current batch size", registry=registry).set_function(active)
        self._others = _histograms("tgi_request_", registry, {}, _TGI)

    def count_opened(self) -> None:
        self._num_opened += 1

    def count_success(self, request: RequestRecord, samplings: Iterable[Sampling]) -> None:
        self._num_ok += 1
        queue, inference = request.queue or 0.0, request.total - request.started
        for name, value in (
            ("duration", request.total),
            ("validation_duration", request.started - queue),
            ("queue_duration", queue),
            ("inference_duration", inference),
            ("mean_time_per_token_duration", inference / max(1, request.num_tokens)),
            ("generated_tokens", request.num_tokens),
            ("input_length", request.num_prompt_tokens),
            *(("max_new_tokens", sampling.max_new_tokens) for sampling in samplings),
        ):
            self._others[name].observe(value)

    def count_failure(self, outcome: str) -> None:
        self._failed[_TGI_ERRORS[outcome]] += 1

    def counters(self) -> bytes:
        """Return the counters as text. With prometheus_client, their names would end with `_total`, unlike TGI's."""
        values = (
            ("tgi_request_count", "Total number of requests", self._num_opened),
            ("tgi_request_success", "Number of successful requests", self._num_ok),
        )
        lines = [f"# HELP {name} {help}\n# TYPE {name} counter\n{name} {value}\n" for name, help, value in values]
        name = "tgi_request_failure"
        lines.append(f"# HELP {name} Number of failed requests\n# TYPE {name} counter\n")
        lines += [f'{name}{{err="{err}"}} {self._failed[err]}\n' for err in sorted({*_TGI_ERRORS.values()})]
        return "".join(lines).encode()


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
_DURATION_TEXT = "Seconds from a request's acceptance to its last token, without refused requests"
_OWN = (
    ("time_to_first_token_seconds", _FIRST_TOKEN_TEXT, _SECONDS),
    ("time_per_output_token_seconds", "Mean seconds between a request's tokens after the first", _TOKEN_SECONDS),
    ("request_duration_seconds", _DURATION_TEXT, _SECONDS),
)

REPLICA_FAMILIES: tuple[tuple[_Family, str, str, Callable[[ReplicaReport], float]], ...] = (
    (GaugeMetricFamily, "ready", "1 while the replica can serve", lambda replica: replica.ready),
    (GaugeMetricFamily, "active_sequences", "Sequences in the replica", lambda replica: replica.num_active),
    (CounterMetricFamily, "requests", "Requests sent to the replica", lambda replica: replica.num_requests),
    (CounterMetricFamily, "generated_tokens", "Tokens generated by the replica", lambda replica: replica.num_tokens),
    (CounterMetricFamily, "restarts", "Restarts of the replica after it was lost", lambda replica: replica.restarts),
)
"""Metrics that are exported for each replica if there are several replicas."""

OUTCOMES = ("ok", "refused", "overloaded", "unavailable", "failed", "cancelled")
_NOT_ADMITTED = ("refused", "overloaded", "unavailable")


@dataclass(frozen=True)
class Gauges(Collector):
    """Functions that return current values. They are called when the metrics are requested.

    Totals are read in this way too, because updating a Counter in each step would cost too much.

    Attributes:
        queued: returns the number of requests that wait for the engine.
        active: returns the number of sequences in the engine. A beam search counts as one sequence.
        tokens: returns the number of tokens generated so far.
        restarts: returns the number of engine restarts.
        statistics: returns the statistics of the engine, or None until the engine has reported some.
        replicas: returns a report on each replica, or an empty list if there is only one engine.
        adapters: returns the names of the registered LoRA adapters.
    """

    queued: Callable[[], int]
    active: Callable[[], int]
    tokens: Callable[[], int]
    restarts: Callable[[], int]
    statistics: Callable[[], EngineStatistics | None]
    replicas: Callable[[], Sequence[ReplicaReport]]
    adapters: Callable[[], Sequence[str]] = tuple

    def engines(self) -> list[tuple[int, EngineStatistics]]:
        """Return the number of sequences in each engine, with the statistics of the engine."""
        found = [(replica.num_active, replica.statistics) for replica in self.replicas()]
        found = found or [(self.active(), self.statistics())]
        return [(num_active, statistics or EngineStatistics()) for num_active, statistics in found]

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("lmi_generated_tokens", "Tokens generated", value=self.tokens())
        text = "Restarts of engines after they were lost"
        yield CounterMetricFamily("lmi_engine_restarts", text, value=self.restarts())
        replicas = self.replicas()
        for kind, name, text, value in REPLICA_FAMILIES if replicas else ():
            values = [([str(replica.number)], value(replica)) for replica in replicas]
            yield _labelled(kind, f"lmi_replica_{name}", text, ["replica"], values)


class _Adapters(Collector):
    """Metrics of the registered LoRA adapters. Without adapters, nothing is exported."""

    def __init__(self, names: Callable[[], Sequence[str]]) -> None:
        self._names = names
        self.num_requests: Counts[str] = Counts()

    def collect(self) -> Iterator[Metric]:
        if not (names := self._names()):
            return
        for gone in {*self.num_requests} - {*names}:
            self.num_requests.pop(gone, None)  # metrics may be requested twice at the same time
        yield GaugeMetricFamily("lmi_adapters", "Registered LoRA adapters", value=len(names))
        counts = [([name], self.num_requests[name]) for name in names]
        text = "Requests with a LoRA adapter"
        yield _labelled(CounterMetricFamily, "lmi_adapter_requests", text, ["adapter"], counts)


class _Captured(Collector):
    """The metrics of `option.capture_requests`."""

    def __init__(self, counts: Callable[[], tuple[int, int]]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        text = "Requests captured with option.capture_requests, by outcome: written or dropped"
        counts = zip((["written"], ["dropped"]), self._counts(), strict=True)
        yield _labelled(CounterMetricFamily, "lmi_captured_requests", text, ["outcome"], counts)


class Ended:
    """Counts and durations of finished requests that reached the engine, as in Triton's statistics.

    Source: triton-inference-server/server, docs/protocol/extension_statistics.md.
    """

    def __init__(self) -> None:
        self._numbers = {"success": 0, "fail": 0}
        self._seconds = {"success": 0.0, "fail": 0.0, "queue": 0.0, "compute_infer": 0.0}
        self._last = 0.0

    def count(self, request: RequestRecord) -> None:
        outcome, seconds = "success" if request.outcome == "ok" else "fail", self._seconds
        self._last = time.time()
        self._numbers[outcome] += 1
        seconds[outcome] += request.total
        seconds["queue"] += request.queue or 0.0
        seconds["compute_infer"] += max(request.total - request.started, 0.0)

    @property
    def last(self) -> int:
        """The time at which the last request ended, in milliseconds since 1970, or 0."""
        return round(self._last * 1000)

    @property
    def durations(self) -> dict[str, dict[str, int]]:
        """The number of requests and their total duration in nanoseconds, by Triton's name for the outcome or phase."""
        ended = sum(self._numbers.values())
        numbers = dict.fromkeys(("queue", "compute_input", "compute_infer", "compute_output"), ended)
        numbers = {**self._numbers, **numbers, "cache_hit": 0, "cache_miss": 0}
        return {name: {"count": n, "ns": round(self._seconds.get(name, 0.0) * 1e9)} for name, n in numbers.items()}


class Metrics:
    """The metrics of a server. Each server has its own registry, so that several servers in one process (as in tests)
    do not conflict.

    Args:
        model_name: value of the label `model_name` in vLLM's metrics.
        gauges: functions that return current values.
        tgi: whether to export TGI's metrics too.
        tracer: tracer that records each request, or None without tracing.

    Attributes:
        by_outcome: counters of requests by outcome, one of `OUTCOMES`.
        ended: counts and durations of finished requests for Triton's statistics.
        recorders: functions that are called with the record of each request that has ended.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, model_name: str, gauges: Gauges, *, tgi: bool = False, tracer: Tracer | None = None) -> None:
        self._tracer = tracer
        self.ended = Ended()
        self.recorders: list[Callable[[RequestRecord], object]] = [] if tracer is None else [tracer.record]
        self.registry = registry = CollectorRegistry()
        requests = Counter("lmi_requests", "Requests by outcome", ["outcome"], registry=registry)
        self.by_outcome = {outcome: requests.labels(outcome) for outcome in OUTCOMES}
        self.prompt_tokens = Counter("lmi_prompt_tokens", "Prompt tokens accepted", registry=registry)
        registry.register(gauges)
        self.ready = Gauge("lmi_engine_ready", "1 while the engine can serve", registry=registry)
        queued = Gauge("lmi_queued_requests", "Requests waiting for the engine", registry=registry)
        queued.set_function(gauges.queued)
        active = Gauge("lmi_active_sequences", "Sequences in the engine", registry=registry)
        active.set_function(gauges.active)
        self._histograms = _histograms("lmi_", registry, {}, _OWN)
        self._adapters = _Adapters(gauges.adapters)
        registry.register(self._adapters)
        self._vllm = VllmMetrics(registry, model_name, gauges)
        self._tgi = TgiMetrics(registry, gauges.queued, gauges.active) if tgi else None

    def show_captured(self, counts: Callable[[], tuple[int, int]]) -> None:
        """Export the numbers of captured requests.

        Args:
            counts: function that returns the numbers of written and dropped requests.
        """
        self.registry.register(_Captured(counts))

    def count_opened(self) -> None:
        """Count a request that TGI would count: it is accepted, or refused for a parameter or as unavailable."""
        if self._tgi is not None:
            self._tgi.count_opened()

    def count_first(self, seconds: float) -> None:
        """Count the first token of a request, `seconds` after its acceptance."""
        self._histograms["time_to_first_token_seconds"].observe(seconds)
        self._vllm.first_token.observe(seconds)

    def count(self, request: RequestRecord, parsed: Sequence[Request] = (), *, opened: bool = True) -> None:
        """Count a request that has ended, and pass it to the recorders.

        As in vLLM, TGI and DJL Serving, durations exclude requests that were refused or did not need the engine, such
        as /tokenize. Their short durations would hide the long durations on an overloaded server.

        Args:
            parsed: the prompts of the request, with their parameters.
            opened: whether `count_opened` has counted the request.
        """
        self.by_outcome[request.outcome].inc()
        admitted = request.queue is not None and request.outcome not in _NOT_ADMITTED
        if request.queue is not None:
            self.ended.count(request)
        if admitted:
            self._histograms["request_duration_seconds"].observe(request.total)
        self.prompt_tokens.inc(request.num_prompt_tokens)
        num_tokens, after_first = request.num_tokens, request.total - request.first
        if num_tokens > 1:
            self._histograms["time_per_output_token_seconds"].observe(after_first / (num_tokens - 1))
        num_sequences, between = sum(one.sampling.num_sequences for one in parsed), None
        if (later := num_tokens - num_sequences) > 0:
            self._vllm.inter_token.observe(between := after_first * num_sequences / later, later)
        samplings = [one.sampling for one in parsed if one.pooling is None]
        self._vllm.count(request, samplings, between)
        self._adapters.num_requests.update({one.adapter.name for one in parsed if one.adapter is not None})
        if self._tgi is not None and opened:
            if request.outcome != "ok":
                self._tgi.count_failure(request.outcome)
            elif admitted:
                self._tgi.count_success(request, samplings)
        for note in self.recorders:
            note(request)

    def render(self) -> bytes:
        own = generate_latest(self.registry)
        return own if self._tgi is None else own + self._tgi.counters()

    def close(self) -> None:
        """Send the remaining spans."""
        if self._tracer is not None:
            self._tracer.close()


# -- times and token counts of a request, for the metrics, the log and the trace ---------------------------------------


@dataclass
class _Times:
    """Times of the request phases before the first token, by time.perf_counter(). Each is 0 until it is reached."""

    accepted: float = 0.0
    encoded: float = 0.0
    started: float = 0.0


class RequestStats:
    """The times and token counts of a request. `close` records them in the metrics, the log and the trace.

    Args:
        request_id: id of the request, as known to the client.
        metrics: metrics that count the request.
        log_prompts: value of `option.log_prompts`.
        headers: request headers by name in lower case.

    Attributes:
        first_at: time of the first delta from the engine, even if it is a failure, by time.perf_counter(), or 0 before
            that.
        num_prompt_tokens: number of prompt tokens.
        num_tokens: number of tokens generated so far.
        error: error message, or "" without an error.
    """

    def __init__(
        self,
        request_id: str,
        metrics: Metrics,
        *,
        log_prompts: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._request_id = request_id
        self._headers = headers or {}
        self._metrics = metrics
        self._parsed: ParsedRequest | None = None
        self._prompts: Sequence[Any] | None = () if log_prompts else None
        self._times = _Times()
        self._first_counted = False
        self.first_at = 0.0
        self.num_prompt_tokens = 0
        self.num_tokens = 0
        self.error = ""
        self._opened = False

    def count_opened(self) -> None:
        """Count the request for TGI's `tgi_request_count`."""
        self._opened = True
        self._metrics.count_opened()

    def note_accepted(self, parsed: ParsedRequest) -> None:
        """Record that the body has been parsed. All times of the request are measured from here."""
        self._parsed = parsed
        if self._prompts is not None:
            self._prompts = [request.messages or request.prompt for request in parsed.requests]
        self._times.accepted = time.perf_counter()

    def note_encoded(self, parsed: ParsedRequest) -> None:
        """Record that the prompts have been tokenized and are within the limits of the model."""
        self._parsed = parsed
        self._times.encoded = time.perf_counter()

    def note_started(self) -> None:
        """Record that the engine has started the request."""
        self._times.started = time.perf_counter()

    def note_first(self) -> None:
        """Record that the engine has returned the first delta, even if it is a failure."""
        self.first_at = time.perf_counter()
        if self.num_tokens:
            self._count_first()

    def _count_first(self) -> None:
        self._first_counted = True
        self._metrics.count_first(self.first_at - self._times.accepted)

    def timing(self) -> Timing:
        """Return the times of a request whose last token has been generated."""
        times = self._times
        return Timing(
            validation=times.encoded - times.accepted,
            queue=times.started - times.encoded,
            inference=time.perf_counter() - times.started,
            num_prompt_tokens=self.num_prompt_tokens,
            num_tokens=self.num_tokens,
        )

    def close(self, outcome: str, finish: Finish | None = None) -> None:
        """Record the request in the metrics, the log and the trace.

        Args:
            outcome: one of `OUTCOMES`.
            finish: finish reason of the last sequence.
        """
        if self.num_tokens and not self._first_counted:  # the first delta had no token
            self._count_first()
        record = self._record(outcome, finish)
        requests, ignored = (self._parsed.requests, self._parsed.ignored) if self._parsed is not None else ((), ())
        self._metrics.count(record, requests, opened=self._opened)
        if not log.isEnabledFor(logging.INFO):
            return
        names = [name[:64] for name in ignored[:32]]
        fields: dict[str, Any] = {
            "request_id": self._request_id,
            "outcome": outcome,
            "prompt_tokens": self.num_prompt_tokens,
            "tokens": self.num_tokens,
            "first_token_s": round(record.first, 3),
            "seconds": round(record.total, 3),
        }
        more = {name: value for name, value in (("ignored", names), ("error", self.error)) if value}
        log.info(
            "id=%s outcome=%s prompt_tokens=%d tokens=%d first_token_s=%.3f seconds=%.3f%s%s",
            *fields.values(),
            f" ignored={','.join(names)!r}" if names else "",
            f" error={self.error!r}" if self.error else "",
            extra={"fields": {**fields, **more}},
        )
        if self._prompts is not None and self._parsed is not None:
            id = self._request_id
            log.info("id=%s prompts=%r", id, self._prompts, extra=of_request(id))

    def _record(self, outcome: str, finish: Finish | None) -> RequestRecord:
        times = self._times
        return RequestRecord(
            id=self._request_id,
            headers=self._headers,
            outcome=outcome,
            finish=finish.value if finish is not None else "",
            error=self.error,
            num_prompt_tokens=self.num_prompt_tokens,
            num_tokens=self.num_tokens,
            queue=times.started - times.encoded if times.started else None,
            started=times.started - times.accepted if times.started else 0.0,
            first=self.first_at - times.accepted if self.num_tokens else 0.0,
            total=time.perf_counter() - times.accepted if times.accepted else 0.0,
        )
