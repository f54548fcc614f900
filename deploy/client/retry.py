"""When a request is sent again: only where nothing was computed for it (`NotStarted`), and within limits.

boto3's own retries are switched off: after a read timeout it sends the same request again while the model is still at
the first, so that one answer costs three generations (contract sagemaker.md, section 1.4).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from deploy.client.errors import NoCapacity, NotStarted

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Patience:
    """How long a request is tried, in seconds from its first attempt.

    Attributes:
        busy: while it is throttled, or there is no connection.
        cold: while there is no copy: an instance's start takes minutes.
        first: the first pause; each is up to twice as long as the one before, with jitter.
        longest: the longest pause.
    """

    busy: float = 60.0
    cold: float = 900.0
    first: float = 0.5
    longest: float = 20.0

    def limit(self, error: NotStarted) -> float:
        return self.cold if isinstance(error, NoCapacity) else self.busy


PATIENT = Patience()
IMPATIENT = Patience(busy=0, cold=0)


def with_retries(
    attempt: Callable[[], _Answer],
    patience: Patience,
    report: Callable[[NotStarted, float], None] | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> _Answer:
    """`attempt`'s answer, tried again while it raises `NotStarted`.

    Args:
        report: called before each pause, with what happened and the pause in seconds.

    Raises:
        NotStarted: the last one, at the limit.
        RequestFailed: whatever else `attempt` raises, at once.
    """
    started, pause = clock(), patience.first
    while True:
        try:
            return attempt()
        except NotStarted as error:
            remaining = started + patience.limit(error) - clock()
            if remaining <= 0:
                raise
            wait = min(pause * random.uniform(0.5, 1.0), remaining)
            if report is not None:
                report(error, wait)
            sleep(wait)
            pause = min(2 * pause, patience.longest)
