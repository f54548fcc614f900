"""Times and token counts of a request, for the metrics, the log and the trace."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from handler.core.log import log_frequent, of_request
from handler.core.values import Finish, Request
from handler.protocols.kernel.dialect import ParsedRequest, Timing
from handler.serving.metrics.ended import EndedRequest
from handler.serving.metrics.tracing import RequestRecord

log = logging.getLogger("handler.request")

_MAX_UNCOUNTED = 256  # number of ended requests at which they are counted, although nobody reads the metrics
_LINE = "id=%s outcome=%s prompt_tokens=%d tokens=%d first_token_s=%.3f seconds=%.3f%s%s%s"


class RequestCounter(ABC):
    """Collects the numbers of requests until they are counted: many at once, because this costs less.

    Attributes:
        num_opened: number of requests that TGI would count at their start.
        recorders: functions that are called with the record of each request that has ended.
    """

    def __init__(self) -> None:
        self.num_opened = 0
        self.recorders: list[Callable[[RequestRecord], object]] = []
        self._uncounted = deque[EndedRequest]()
        self._uncounted_firsts = deque[float]()

    @abstractmethod
    def update(self) -> None:
        """Count what `_take_uncounted` and `_take_firsts` return."""

    def count_opened(self) -> None:
        """Count a request that TGI would count: it is accepted, or refused for a parameter or as unavailable."""
        self.num_opened += 1

    def count_first(self, seconds: float) -> None:
        """Count the first token of a request, `seconds` after its acceptance."""
        self._uncounted_firsts.append(seconds)

    def count(self, request: RequestRecord, parsed: Sequence[Request] = (), *, opened: bool = True) -> None:
        """Count a request that has ended, and pass it to the recorders.

        As in vLLM, TGI and DJL Serving, durations exclude requests that were refused or did not need the engine, such
        as /tokenize. Their short durations would hide the long durations on an overloaded server.

        Args:
            parsed: the prompts of the request, with their parameters.
            opened: whether `count_opened` has counted the request.
        """
        numbers = EndedRequest(
            request.outcome,
            request.finish,
            request.num_prompt_tokens,
            request.num_tokens,
            request.queue,
            request.started,
            request.first,
            request.total,
            time.time(),
            sum([item.sampling.num_sequences for item in parsed]),
            [(item.sampling.n, item.sampling.max_new_tokens) for item in parsed if item.pooling is None],
            {item.adapter.name for item in parsed if item.adapter is not None},
            opened,
            request.num_questions,
        )
        self._uncounted.append(numbers)
        if len(self._uncounted) >= _MAX_UNCOUNTED:
            self.update()
        for note in self.recorders:
            note(request)

    def _take_uncounted(self) -> list[EndedRequest]:
        """Remove and return the requests that are not counted yet. The caller holds a lock, but others may add some."""
        return [self._uncounted.popleft() for _ in range(len(self._uncounted))]

    def _take_firsts(self) -> list[float]:
        """Remove and return the seconds to first tokens that are not counted yet, as `_take_uncounted` does."""
        return [self._uncounted_firsts.popleft() for _ in range(len(self._uncounted_firsts))]


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
        metrics: RequestCounter,
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
            _log_request(record, () if parsed is None else parsed.ignored)
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
            num_questions=_num_questions(self._parsed),
        )


def _num_questions(parsed: ParsedRequest | None) -> int:
    """Return the number of questions to decide, or 0 if the request is for anything else."""
    if parsed is None or not parsed.requests:
        return 0
    pooling = parsed.requests[0].pooling
    return len(parsed.requests) if pooling is not None and pooling.labels else 0


def _log_request(request: RequestRecord, ignored: Sequence[str]) -> None:
    """Log a request that has ended. The caller has checked that the log is enabled for INFO.

    Args:
        ignored: names of the parameters that were ignored. The client chooses them, so the line has a part of them.
    """
    names = [name[:64] for name in ignored[:32]]

    def fields() -> dict[str, Any]:
        return {
            "request_id": request.id,
            "outcome": request.outcome,
            "prompt_tokens": request.num_prompt_tokens,
            "tokens": request.num_tokens,
            "first_token_s": round(request.first, 3),
            "seconds": round(request.total, 3),
            **({"questions": request.num_questions} if request.num_questions else {}),
            **({"ignored": names} if names else {}),
            **({"error": request.error} if request.error else {}),
        }

    arguments = (
        request.id,
        request.outcome,
        request.num_prompt_tokens,
        request.num_tokens,
        request.first,
        request.total,
        f" questions={request.num_questions}" if request.num_questions else "",
        f" ignored={','.join(names)!r}" if names else "",
        f" error={request.error!r}" if request.error else "",
    )
    log_frequent(log, _LINE, arguments, fields)
