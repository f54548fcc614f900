"""Times and token counts of a request, for the metrics, the log and the trace."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from handler.core.log import of_request
from handler.core.values import Finish
from handler.protocols.kernel.dialect import ParsedRequest, Timing
from handler.serving.metrics.prometheus import Metrics
from handler.serving.metrics.request_line import log, log_request
from handler.serving.metrics.tracing import RequestRecord


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
        parsed = self._parsed
        self._metrics.count(record, () if parsed is None else parsed.requests, opened=self._opened)
        if log.isEnabledFor(logging.INFO):
            log_request(record, () if parsed is None else parsed.ignored)
            if self._prompts is not None and parsed is not None:
                log.info("id=%s prompts=%r", record.id, self._prompts, extra=of_request(record.id))

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
