"""Measure an endpoint at rising load, one level after another."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from deploy.bench.metrics import summary
from deploy.bench.requests import Send, in_threads
from deploy.client.errors import RequestFailed
from handler.bench.load import Ask, Result, closed_loop, open_loop, poisson_times

MAX_THREADS = 512
"""Requests under way at once in an open loop."""


@dataclass(frozen=True)
class Plan:
    """The levels of a measurement.

    Attributes:
        clients: closed loops, a level each; ignored if there are rates.
        rates: open loops, requests a second.
        requests: requests of each level; None: 4 a client, at least 8; of an open loop 50.
    """

    clients: tuple[int, ...]
    rates: tuple[float, ...] = ()
    requests: int | None = None

    @property
    def connections(self) -> int:
        return MAX_THREADS if self.rates else max(self.clients)


def measure(plan: Plan, send: Send, warm_up: Send, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return one `summary` a level.

    Args:
        warm_up: sends a first request, which is not measured: it wakes an endpoint that is scaled to zero.

    Raises:
        RequestFailed: the first request failed.
    """
    first = warm_up(0)
    if first.error:
        raise RequestFailed(f"the request before the measurement failed: {first.error}", "Try `lmi deploy stream`.")
    with ThreadPoolExecutor(plan.connections) as pool:
        ask = in_threads(send, pool)
        numbers = itertools.count(1)
        if plan.rates:
            return [_open_level(plan, rate, ask, numbers, report) for rate in plan.rates]
        return [_closed_level(plan, clients, ask, numbers, report) for clients in plan.clients]


def _closed_level(
    plan: Plan, clients: int, ask: Ask, numbers: Iterator[int], report: Callable[[str], None]
) -> dict[str, Any]:
    requests = plan.requests or max(8, 4 * clients)
    report(f"{requests} requests, {clients} at once ...")
    shared = iter(list(itertools.islice(numbers, requests)))  # a client sends the next request that nobody has sent

    async def run() -> list[Result]:
        return await closed_loop(ask, [shared] * clients)

    return summary({"clients": clients}, asyncio.run(run()))


def _open_level(
    plan: Plan, rate: float, ask: Ask, numbers: Iterator[int], report: Callable[[str], None]
) -> dict[str, Any]:
    requests = plan.requests or 50
    report(f"{requests} requests, {rate:g} a second ...")
    chosen = list(itertools.islice(numbers, requests))
    arrivals = zip(chosen, poisson_times(rate, seed=chosen[0]), strict=False)

    async def run() -> list[Result]:
        return await open_loop(ask, arrivals, time.monotonic())

    return summary({"rate": rate}, asyncio.run(run()))
