"""Metrics with vLLM's names, labels, units and buckets (vllm/v1/metrics/loggers.py and buckets.py, 0.33)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from handler.core.values import Finish
from handler.engines.base import EngineStatistics
from handler.serving.metrics.ended import EndedRequest
from handler.serving.metrics.families import Family, Histogram, histograms, labelled
from handler.serving.metrics.gauges import Gauges

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
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

FIRST_TOKEN_TEXT = "Seconds from a request's acceptance to its first token"
_VLLM = (
    ("inter_token_latency_seconds", "Mean seconds between a request's tokens, counted for each token", _INTER_TOKEN),
    ("request_queue_time_seconds", "Seconds from tokenizing a request to its start in the engine", _QUEUE),
    ("e2e_request_latency_seconds", "Seconds from a request's acceptance to its last token", _QUEUE),
    ("request_inference_time_seconds", "Seconds that a request spends in the engine", _QUEUE),
    ("request_prefill_time_seconds", "Seconds from the start in the engine to the first token", _QUEUE),
    ("request_decode_time_seconds", "Seconds from the first token to the last", _QUEUE),
    ("request_time_per_output_token_seconds", "Mean seconds between a request's tokens", _INTER_TOKEN),
    ("request_prompt_tokens", "Prompt tokens per request", TOKENS),
    ("request_generation_tokens", "Generated tokens per request", TOKENS),
    ("request_params_n", "Value of a request's parameter n", _NUMBERS),
    ("request_params_max_tokens", "Maximum number of new tokens per request", TOKENS),
)

_REASONS = {"ok": "stop", "cancelled": "abort", "failed": "error"}
"""vLLM's `finished_reason` by outcome. It is `length` instead if a limit has cut off the response."""


class VllmMetrics(Collector):
    """Metrics with the same names as those of vLLM.

    Args:
        gauges: functions that return current values.

    Attributes:
        first_token: histogram of seconds from a request's acceptance to its first token.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, gauges: Gauges) -> None:
        self._model_name = model_name
        self._gauges = gauges
        self._num_prompt_tokens = 0
        labels = dict(zip(_LABELS, (model_name, _FIRST), strict=True))
        name = "vllm:time_to_first_token_seconds"
        self.first_token = Histogram(name, FIRST_TOKEN_TEXT, _FIRST_TOKEN, registry, labels)
        registry.register(self)
        self._others = histograms("vllm:", registry, labels, _VLLM)
        # Sum and count are exact. Measuring every token would cost too much, so each counts with its request's mean.
        self._inter_token = self._others["inter_token_latency_seconds"]
        self._ended = dict.fromkeys(("stop", "length", "abort", "error"), 0)

    def count(self, requests: Sequence[EndedRequest]) -> None:
        """Count requests that have ended, except those that never reached the engine."""
        for request in requests:
            if request.num_later > 0:
                self._inter_token.observe(request.per_token, request.num_later)
        reached = [request for request in requests if request.queue is not None]
        self._count_durations(reached)
        histograms = self._others
        histograms["request_prompt_tokens"].observe_all([request.num_prompt_tokens for request in reached])
        histograms["request_generation_tokens"].observe_all([request.num_tokens for request in reached])
        histograms["request_params_n"].observe_all([n for request in reached for n, _ in request.limits])
        histograms["request_params_max_tokens"].observe_all(
            [limit for request in reached for _, limit in request.limits]
        )
        for request in reached:
            self._num_prompt_tokens += request.num_prompt_tokens
            is_cut = request.outcome == "ok" and request.finish == Finish.LENGTH.value
            self._ended["length" if is_cut else _REASONS.get(request.outcome, "error")] += 1

    def _count_durations(self, reached: Sequence[EndedRequest]) -> None:
        """Count the durations of requests that have reached the engine."""
        histograms = self._others
        histograms["request_queue_time_seconds"].observe_all([request.queue or 0.0 for request in reached])
        histograms["e2e_request_latency_seconds"].observe_all([request.total for request in reached])
        histograms["request_inference_time_seconds"].observe_all(
            [request.total - request.started for request in reached]
        )
        begun = [request for request in reached if request.num_tokens]
        histograms["request_prefill_time_seconds"].observe_all([request.first - request.started for request in begun])
        histograms["request_decode_time_seconds"].observe_all([request.total - request.first for request in begun])
        per_token = [request.per_token for request in reached if request.num_later > 0]
        histograms["request_time_per_output_token_seconds"].observe_all(per_token)

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
        yield labelled(counter, "vllm:request_success", "Requests by finish reason", labels, ended)

    def _loads(self, engines: Sequence[tuple[int, EngineStatistics]]) -> Iterator[Metric]:
        """Yield the numbers of running and waiting requests."""
        gauge, text = GaugeMetricFamily, "Requests waiting in the queue, or for room in the engine"
        waiting = [min(report.num_waiting or 0, num) for num, report in engines]  # statistics may be a second old
        running = [num - waits for (num, _), waits in zip(engines, waiting, strict=True)]
        waiting[0] += self._gauges.queued()
        yield from self._family(gauge, "num_requests_running", "Sequences that the engine is computing", running)
        yield from self._family(gauge, "num_requests_waiting", text, waiting)

    def _family(self, kind: Family, name: str, text: str, values: Iterable[float | None]) -> Iterator[Metric]:
        """Yield a metric with a value for each engine, unless no engine has a value."""
        samples = [((self._model_name, str(number)), value) for number, value in enumerate(values) if value is not None]
        if samples:
            yield labelled(kind, f"vllm:{name}", text, _LABELS, samples)
