"""Retry requests that have not started (`NotStarted`), within time limits.

boto3's own retries are off. After a read timeout boto3 sends the request again while the model still works on the
first. So one answer could cost three generations.
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
    """Time limits of retries, in seconds from the first attempt.

    Attributes:
        busy: while throttled, or without a connection.
        cold: while there is no copy: an instance takes minutes to start.
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
    """Return `attempt`'s result; repeat it while it raises `NotStarted`.

    Args:
        report: called before each pause, with the error and the pause in seconds.

    Raises:
        NotStarted: the last one, at the limit.
        RequestFailed: any other error of `attempt`, at once.
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
