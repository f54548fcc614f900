"""Metrics by vLLM's names, labels, units and buckets (vllm/v1/metrics/loggers.py and buckets.py, 0.32).

A value that the engine does not report is not exported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from handler.core.values import Finish
from handler.engines.base import EngineStatistics
from handler.serving.metrics.histogram import Histogram

_LABELS = ("model_name", "engine")
_FIRST = "0"  # vLLM numbers the engines of a server, as we do replicas; what belongs to none is the first one's

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
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
"""vLLM's end at the model's context."""

_REASONS = {"ok": "stop", "cancelled": "abort", "failed": "error"}
"""A request's outcome -> its `finished_reason`, which is `length` where it was cut off."""


class VllmMetrics(Collector):
    """Attributes:
    first_token: seconds from a request's acceptance to its first token.
    inter_token: seconds between tokens. Each of a request's tokens counts with the request's mean: the true
        distribution would cost time at every token. Sum and count are exact.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        queued: Callable[[], int],
        engines: Callable[[], Sequence[tuple[int, EngineStatistics]]],
    ) -> None:
        """
        Args:
            queued: returns the number of requests in the queue.
            engines: returns each engine's number of sequences, and its report.
        """
        self._model_name = model_name
        self._queued, self._engines = queued, engines
        labels = dict(zip(_LABELS, (model_name, _FIRST), strict=True))
        self.first_token = Histogram(
            "vllm:time_to_first_token_seconds",
            "From a request's acceptance to its first token",
            _FIRST_TOKEN,
            registry,
            labels,
        )
        registry.register(self)
        self.inter_token = Histogram(
            "vllm:inter_token_latency_seconds",
            "Mean time between a request's tokens, counted for each",
            _INTER_TOKEN,
            registry,
            labels,
        )
        self._queue = Histogram(
            "vllm:request_queue_time_seconds", "From the tokenized prompt to the engine", _QUEUE, registry, labels
        )
        self._prompt_tokens = Histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request", _TOKENS, registry, labels
        )
        self._generated = Histogram(
            "vllm:request_generation_tokens", "Tokens generated for a request", _TOKENS, registry, labels
        )
        self._ended = dict.fromkeys(("stop", "length", "abort", "error"), 0)

    def count(self, outcome: str, finish: Finish | None, queue: float, num_prompt_tokens: int, num_tokens: int) -> None:
        """Count a request that the engine got, at its end.

        Args:
            queue: seconds from the tokenized prompt to the engine.
        """
        self._queue.observe(queue)
        self._prompt_tokens.observe(num_prompt_tokens)
        self._generated.observe(num_tokens)
        reason = "length" if outcome == "ok" and finish is Finish.LENGTH else _REASONS.get(outcome, "error")
        self._ended[reason] += 1

    def collect(self) -> Iterator[Metric]:
        engines = self._engines()
        waiting = [min(report.num_waiting or 0, num) for num, report in engines]  # the report may be a second old
        running = [num - waits for (num, _), waits in zip(engines, waiting, strict=True)]
        waiting[0] += self._queued()
        reports = [report for _, report in engines]
        usage = [report.kv_cache_usage for report in reports]
        known = [report if report.prefix_cache_hits is not None else EngineStatistics() for report in reports]
        queries, hits = [one.prefix_cache_queries for one in known], [one.prefix_cache_hits for one in known]
        preemptions = [report.num_preemptions for report in reports]
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        for kind, name, help, values in (
            (gauge, "num_requests_running", "Sequences that the engine computes", running),
            (gauge, "num_requests_waiting", "Requests in the queue, and in the engine without room", waiting),
            (gauge, "kv_cache_usage_perc", "Used part of the KV cache, 0 to 1", usage),
            (counter, "prefix_cache_queries", "Prompt tokens looked up in the prefix cache", queries),
            (counter, "prefix_cache_hits", "Prompt tokens found in the prefix cache", hits),
            (counter, "num_preemptions", "Requests that lost their place in the KV cache to others", preemptions),
        ):
            family = kind(f"vllm:{name}", help, labels=_LABELS)
            for number, value in enumerate(values):
                if value is not None:
                    family.add_metric((self._model_name, str(number)), value)
            if family.samples:
                yield family
        ended = counter("vllm:request_success", "Requests by why they ended", labels=(*_LABELS, "finished_reason"))
        for reason, count in self._ended.items():
            ended.add_metric((self._model_name, _FIRST, reason), count)
        yield ended
