"""What the log and the metrics say of one request."""

from __future__ import annotations

import logging
import time

from handler.core.values import Delta
from handler.protocols.base import ParsedRequest, Timing
from handler.serving.metrics import Metrics

log = logging.getLogger("handler.request")


class Record:
    """Gathers one request's figures; `close` writes them down once.

    Args:
        request_id: as the client knows it.
        call: what was asked; None until it has been read.
        log_prompts: `option.log_prompts`.
        metrics: where the figures are counted; None where the host has no metrics of its own.
    """

    def __init__(
        self,
        request_id: str,
        call: ParsedRequest | None = None,
        *,
        log_prompts: bool = False,
        metrics: Metrics | None = None,
    ) -> None:
        self._request_id = request_id
        self.call = call
        self._log_prompts = log_prompts
        self._metrics = metrics
        self._received_at = time.perf_counter()
        self._encoded_at = 0.0
        self._started_at = 0.0
        self._first_at = 0.0
        self._num_tokens = 0
        self.num_prompt_tokens = 0
        self.error = ""
        self.outcome = ""

    def note_encoded(self) -> None:
        """The prompts are within the model's limits."""
        self._encoded_at = time.perf_counter()

    def note_started(self) -> None:
        """The engine got a request."""
        self._started_at = time.perf_counter()

    def timing(self) -> Timing:
        """Of what was answered; call it when the last token has come."""
        return Timing(
            validation=self._encoded_at - self._received_at,
            queue=self._started_at - self._encoded_at,
            inference=time.perf_counter() - self._started_at,
            num_prompt_tokens=self.num_prompt_tokens,
            num_tokens=self._num_tokens,
        )

    def note(self, delta: Delta) -> None:
        """Once a token: the hot path."""
        if not self._first_at:
            self._first_at = time.perf_counter()
        self._num_tokens += len(delta.tokens)

    @property
    def begun(self) -> bool:
        """The engine has answered, be it with a failure."""
        return self._first_at > 0

    def close(self, outcome: str) -> None:
        """`outcome` is ok, failed, refused, overloaded or cancelled."""
        self.outcome = outcome
        now = time.perf_counter()
        seconds = now - self._received_at
        first = self._first_at - self._received_at if self._num_tokens else 0.0
        if self._metrics is not None:
            self._count(self._metrics, seconds, first)
        ignored = self.call.ignored if self.call is not None else ()
        log.info(
            "id=%s outcome=%s prompt_tokens=%d tokens=%d first_token_s=%.3f seconds=%.3f%s%s",
            self._request_id, outcome, self.num_prompt_tokens, self._num_tokens, first, seconds,
            f" ignored={','.join(name[:64] for name in ignored[:32])!r}" if ignored else "",
            f" error={self.error!r}" if self.error else "",
        )  # fmt: skip
        if self._log_prompts and self.call is not None:
            prompts = [request.messages or request.prompt for request in self.call.requests]
            log.info("id=%s prompts=%r", self._request_id, prompts)

    def _count(self, metrics: Metrics, seconds: float, first: float) -> None:
        metrics.requests.labels(self.outcome).inc()
        metrics.duration.observe(seconds)
        metrics.prompt_tokens.inc(self.num_prompt_tokens)
        if self._num_tokens:
            metrics.first_token.observe(first)
        if self._num_tokens > 1:
            metrics.per_token.observe((seconds - first) / (self._num_tokens - 1))
