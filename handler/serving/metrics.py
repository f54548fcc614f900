"""Prometheus metrics of a server, and one request's times and token counts, which the log gets too.

Labels are few: SageMaker turns each combination into a CloudWatch metric.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from handler.protocols.base import ParsedRequest, Timing

log = logging.getLogger("handler.request")

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


class RequestStats:
    """One request's times and counts; `close` writes them down once.

    Args:
        request_id: as the client knows it.
        metrics: where they are counted; None where only the log gets them.
        log_prompts: `option.log_prompts`.

    Attributes:
        engine_answered: a delta has come, be it a failure.
        num_prompt_tokens, num_tokens: so far.
    """

    def __init__(self, request_id: str, metrics: Metrics | None = None, *, log_prompts: bool = False) -> None:
        self._request_id = request_id
        self._log_prompts = log_prompts
        self._metrics = metrics
        self._parsed: ParsedRequest | None = None
        self._accepted_at = 0.0  # all times are of time.perf_counter()
        self._encoded_at = 0.0
        self._started_at = 0.0
        self._first_at = 0.0
        self.engine_answered = False
        self.num_prompt_tokens = 0
        self.num_tokens = 0
        self.error = ""

    def note_accepted(self, parsed: ParsedRequest) -> None:
        """The body has been parsed: the request's time begins."""
        self._parsed = parsed
        self._accepted_at = time.perf_counter()

    def note_encoded(self) -> None:
        """The prompts are within the model's limits."""
        self._encoded_at = time.perf_counter()

    def note_started(self) -> None:
        """The engine got a request."""
        self._started_at = time.perf_counter()

    def note_first(self) -> None:
        """The first delta has come, be it a failure."""
        self.engine_answered = True
        self._first_at = time.perf_counter()

    def timing(self) -> Timing:
        """Return the times of an answer whose last token has come."""
        return Timing(
            validation=self._encoded_at - self._accepted_at,
            queue=self._started_at - self._encoded_at,
            inference=time.perf_counter() - self._started_at,
            num_prompt_tokens=self.num_prompt_tokens,
            num_tokens=self.num_tokens,
        )

    def close(self, outcome: str) -> None:
        """Write the figures down; `outcome` is ok, failed, refused, overloaded or cancelled."""
        seconds = time.perf_counter() - self._accepted_at if self._accepted_at else 0.0
        first = self._first_at - self._accepted_at if self.num_tokens else 0.0
        if self._metrics is not None:
            self._count(self._metrics, outcome, seconds, first)
        ignored = self._parsed.ignored if self._parsed is not None else ()
        log.info(
            "id=%s outcome=%s prompt_tokens=%d tokens=%d first_token_s=%.3f seconds=%.3f%s%s",
            self._request_id, outcome, self.num_prompt_tokens, self.num_tokens, first, seconds,
            f" ignored={','.join(name[:64] for name in ignored[:32])!r}" if ignored else "",
            f" error={self.error!r}" if self.error else "",
        )  # fmt: skip
        if self._log_prompts and self._parsed is not None:
            prompts = [request.messages or request.prompt for request in self._parsed.requests]
            log.info("id=%s prompts=%r", self._request_id, prompts)

    def _count(self, metrics: Metrics, outcome: str, seconds: float, first: float) -> None:
        metrics.requests.labels(outcome).inc()
        metrics.duration.observe(seconds)
        metrics.prompt_tokens.inc(self.num_prompt_tokens)
        if self.num_tokens:
            metrics.first_token.observe(first)
        if self.num_tokens > 1:
            metrics.per_token.observe((seconds - first) / (self.num_tokens - 1))
