"""Gather one request's times and token counts, and write them to the log and the metrics."""

from __future__ import annotations

import logging
import time

from handler.core.values import Delta
from handler.protocols.base import ParsedRequest, Timing
from handler.serving.metrics import Metrics

log = logging.getLogger("handler.request")


class RequestStats:
    """One request's times and counts; `close` writes them down once.

    Args:
        request_id: as the client knows it.
        metrics: where they are counted; None where only the log gets them.
        log_prompts: `option.log_prompts`.
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
        self._num_tokens = 0
        self.num_prompt_tokens = 0
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

    def note(self, delta: Delta) -> None:
        """Count a delta: the hot path, once a token."""
        if not self._first_at:
            self._first_at = time.perf_counter()
        self._num_tokens += len(delta.tokens)

    @property
    def engine_answered(self) -> bool:
        """Whether a delta has come, be it a failure."""
        return self._first_at > 0

    def timing(self) -> Timing:
        """Return the times of an answer whose last token has come."""
        return Timing(
            validation=self._encoded_at - self._accepted_at,
            queue=self._started_at - self._encoded_at,
            inference=time.perf_counter() - self._started_at,
            num_prompt_tokens=self.num_prompt_tokens,
            num_tokens=self._num_tokens,
        )

    def close(self, outcome: str) -> None:
        """Write the figures down; `outcome` is ok, failed, refused, overloaded or cancelled."""
        seconds = time.perf_counter() - self._accepted_at if self._accepted_at else 0.0
        first = self._first_at - self._accepted_at if self._num_tokens else 0.0
        if self._metrics is not None:
            self._count(self._metrics, outcome, seconds, first)
        ignored = self._parsed.ignored if self._parsed is not None else ()
        log.info(
            "id=%s outcome=%s prompt_tokens=%d tokens=%d first_token_s=%.3f seconds=%.3f%s%s",
            self._request_id, outcome, self.num_prompt_tokens, self._num_tokens, first, seconds,
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
        if self._num_tokens:
            metrics.first_token.observe(first)
        if self._num_tokens > 1:
            metrics.per_token.observe((seconds - first) / (self._num_tokens - 1))
