"""What /metrics shows. Labels are few: SageMaker turns each combination into a CloudWatch metric."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)

OUTCOMES = ("ok", "refused", "overloaded", "failed", "cancelled")


class _Tokens(Collector):
    """Asked when somebody looks: a Counter would have to be told at every step, at the price of a token."""

    def __init__(self, count: Callable[[], float]) -> None:
        self._count = count

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily("lmi_generated_tokens", "Tokens generated", value=self._count())


class Metrics:
    """One registry a server, so that two servers in one process (tests) do not meet.

    Args:
        queued, active, tokens: asked for at each look; the last one only ever grows.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(
        self, *, queued: Callable[[], float], active: Callable[[], float], tokens: Callable[[], float]
    ) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("lmi_requests", "Requests by outcome", ["outcome"], registry=self.registry)
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        self.prompt_tokens = Counter("lmi_prompt_tokens", "Prompt tokens accepted", registry=self.registry)
        self.registry.register(_Tokens(tokens))
        self.restarts = Counter("lmi_engine_restarts", "Engines lost and started again", registry=self.registry)
        self.ready = Gauge("lmi_engine_ready", "1 while the engine can serve", registry=self.registry)
        Gauge("lmi_queued_requests", "Requests waiting for the engine", registry=self.registry).set_function(queued)
        Gauge("lmi_active_sequences", "Sequences in the engine", registry=self.registry).set_function(active)
        self.first_token = Histogram(
            "lmi_time_to_first_token_seconds", "From a request's acceptance to its first token",
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.per_token = Histogram(
            "lmi_time_per_output_token_seconds", "Mean time between a request's tokens after the first",
            buckets=_TOKEN_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.duration = Histogram(
            "lmi_request_duration_seconds", "From a request's acceptance to its last token",
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip

    def render(self) -> bytes:
        return generate_latest(self.registry)
