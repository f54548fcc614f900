"""One request's times and token counts: they go into the metrics, the log and the trace."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from handler.core.values import Finish
from handler.protocols.kernel.base import ParsedRequest, Timing
from handler.serving.metrics.prometheus import Metrics
from handler.serving.metrics.tracing import RequestRecord

log = logging.getLogger("handler.request")


class RequestStats:
    """One request's times and counts; `close` writes them down once.

    Args:
        request_id: as the client knows it.
        metrics: where they are counted; None where only the log gets them.
        log_prompts: `option.log_prompts`.
        headers: the request's, names in lower case.

    Attributes:
        engine_answered: a delta has come, be it a failure.
        num_prompt_tokens, num_tokens: so far.
    """

    def __init__(
        self,
        request_id: str,
        metrics: Metrics | None = None,
        *,
        log_prompts: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._request_id = request_id
        self._headers = headers or {}
        self._log_prompts = log_prompts
        self._metrics = metrics
        self._parsed: ParsedRequest | None = None
        self._prompts: Sequence[Any] = ()
        self._accepted_at = 0.0  # all times are of time.perf_counter()
        self._encoded_at = 0.0
        self._started_at = 0.0
        self._first_at = 0.0
        self._first_counted = False
        self.engine_answered = False
        self.num_prompt_tokens = 0
        self.num_tokens = 0
        self.error = ""
        if metrics is not None:
            metrics.count_opened()

    def note_accepted(self, parsed: ParsedRequest) -> None:
        """The body has been parsed: the request's time begins."""
        self._parsed = parsed
        if self._log_prompts:
            self._prompts = [request.messages or request.prompt for request in parsed.requests]
        self._accepted_at = time.perf_counter()

    def note_encoded(self, parsed: ParsedRequest) -> None:
        """The prompts are within the model's limits, and are kept as tokens alone."""
        self._parsed = parsed
        self._encoded_at = time.perf_counter()

    def note_started(self) -> None:
        """The engine got a request."""
        self._started_at = time.perf_counter()

    def note_first(self) -> None:
        """The first delta has come, be it a failure."""
        self.engine_answered = True
        self._first_at = time.perf_counter()
        if self.num_tokens:
            self._count_first()

    def _count_first(self) -> None:
        self._first_counted = True
        if self._metrics is not None:
            self._metrics.count_first(self._first_at - self._accepted_at)

    def timing(self) -> Timing:
        """Return the times of an answer whose last token has come."""
        return Timing(
            validation=self._encoded_at - self._accepted_at,
            queue=self._started_at - self._encoded_at,
            inference=time.perf_counter() - self._started_at,
            num_prompt_tokens=self.num_prompt_tokens,
            num_tokens=self.num_tokens,
        )

    def close(self, outcome: str, finish: Finish | None = None) -> None:
        """Write the figures down.

        Args:
            outcome: ok, failed, refused, overloaded or cancelled.
            finish: why the last sequence ended.
        """
        seconds = time.perf_counter() - self._accepted_at if self._accepted_at else 0.0
        first = self._first_at - self._accepted_at if self.num_tokens else 0.0
        if self.num_tokens and not self._first_counted:  # its first delta had none
            self._count_first()
        if self._metrics is not None:
            requests = self._parsed.requests if self._parsed is not None else ()
            sequences = sum(request.sampling.num_sequences for request in requests)
            self._metrics.count(
                outcome,
                seconds,
                first,
                self.num_prompt_tokens,
                self.num_tokens,
                sequences,
                queue=self._started_at - self._encoded_at if self._started_at else None,
                finish=finish,
                adapters={request.adapter.name for request in requests if request.adapter is not None},
            )
            if self._metrics.recorders:
                record = self._record(outcome, finish, seconds, first)
                for note in self._metrics.recorders:
                    note(record)
        ignored = self._parsed.ignored if self._parsed is not None else ()
        log.info(
            "id=%s outcome=%s prompt_tokens=%d tokens=%d first_token_s=%.3f seconds=%.3f%s%s",
            self._request_id,
            outcome,
            self.num_prompt_tokens,
            self.num_tokens,
            first,
            seconds,
            f" ignored={','.join(name[:64] for name in ignored[:32])!r}" if ignored else "",
            f" error={self.error!r}" if self.error else "",
        )
        if self._log_prompts and self._parsed is not None:
            log.info("id=%s prompts=%r", self._request_id, self._prompts)

    def _record(self, outcome: str, finish: Finish | None, seconds: float, first: float) -> RequestRecord:
        return RequestRecord(
            id=self._request_id,
            headers=self._headers,
            outcome=outcome,
            finish=finish.value if finish is not None else "",
            error=self.error,
            num_prompt_tokens=self.num_prompt_tokens,
            num_tokens=self.num_tokens,
            queue=self._started_at - self._encoded_at if self._started_at else 0.0,
            first=first,
            total=seconds,
        )
