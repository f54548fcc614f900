"""The load generator: send requests in a closed or an open loop on one event loop, and collect their results.

Closed loop: each client sends its next request when the last answer is complete. Open loop: requests are sent when they
are due, however slow the answers are, as the users of a service do.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

PERCENTILES = (50, 90, 99)

_PAUSE = 0.05  # seconds between a failure and the client's next request


class Result(NamedTuple):
    """The result of one request. Times are of the machine's monotonic clock, which its processes share.

    Attributes:
        start: when the request was sent; in an open loop when it was due, so that a late generator hides nothing.
        arrivals: one time for each token (or piece of text), in order; tokens that came in one read have the same.
        end: the answer's last byte, or its failure.
        error: the kind of failure; empty: none.
        counted: tokens as the server counted them; None: one for each arrival.
    """

    start: float
    arrivals: Sequence[float]
    end: float
    error: str = ""
    counted: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.arrivals) if self.counted is None else self.counted


Ask: TypeAlias = Callable[[int], Awaitable[Result]]
"""Send request number n and wait for its whole answer. Does not raise: a failure is a result with an error."""


@dataclass(frozen=True)
class Closed:
    """`clients` that each send `requests`, or go on for `seconds` where that is set (the last answers are awaited)."""

    clients: int
    requests: int = 2
    seconds: float | None = None

    def numbers(self, client: int, begin: float) -> Iterator[int]:
        """Yield the numbers of one client's requests.

        Args:
            begin: when the load begins, on the monotonic clock.
        """
        for turn in itertools.count():
            if turn >= self.requests if self.seconds is None else time.monotonic() >= begin + self.seconds:
                return
            yield client + turn * self.clients


@dataclass(frozen=True)
class Open:
    """`rate` requests a second for `seconds`, at random times (a Poisson process) or evenly."""

    rate: float
    seconds: float = 10.0
    poisson: bool = True
    seed: int = 0

    def due(self) -> list[float]:
        """Return the seconds after the beginning at which a request is to be sent."""
        if not self.poisson:
            return [number / self.rate for number in range(1, int(self.seconds * self.rate) + 1)]
        return list(itertools.takewhile(lambda at: at <= self.seconds, poisson_times(self.rate, self.seed)))


Load: TypeAlias = Closed | Open


def poisson_times(rate: float, seed: int) -> Iterator[float]:
    """Yield the arrival times of a Poisson process without end, in seconds; the same for the same seed."""
    gap = random.Random(seed).expovariate
    at = 0.0
    while True:
        at += gap(rate)
        yield at


async def closed_loop(ask: Ask, clients: Iterable[Iterator[int]]) -> list[Result]:
    """Let each client send the requests of its iterator, one after the other. Clients may share one iterator."""

    async def client(numbers: Iterator[int]) -> list[Result]:
        results = []
        for number in numbers:
            result = await ask(number)
            results.append(result)
            if result.error:
                await asyncio.sleep(_PAUSE)
        return results

    return [result for results in await asyncio.gather(*map(client, clients)) for result in results]


async def open_loop(ask: Ask, arrivals: Iterable[tuple[int, float]], begin: float) -> list[Result]:
    """Send each request at its time.

    Args:
        arrivals: numbers of requests and the seconds after `begin` at which they are due, in order.
        begin: on the monotonic clock.
    """

    async def request(number: int, due: float) -> Result:
        return (await ask(number))._replace(start=due)

    tasks = []
    for number, after in arrivals:
        await asyncio.sleep(begin + after - time.monotonic())
        tasks.append(asyncio.ensure_future(request(number, begin + after)))
    return await asyncio.gather(*tasks)


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Return p50, p90 and p99 by linear interpolation; None without values."""
    if not values:
        return {f"p{percent}": None for percent in PERCENTILES}
    if len(values) == 1:
        return {f"p{percent}": values[0] for percent in PERCENTILES}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"p{percent}": cuts[percent - 1] for percent in PERCENTILES}
