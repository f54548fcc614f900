"""The levels of a measurement, one after another."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deploy.bench.asking import Ask
from deploy.bench.load import MOST_AT_ONCE, closed, opened
from deploy.bench.metrics import summary
from deploy.client.errors import RequestFailed


@dataclass(frozen=True)
class Plan:
    """Attributes:
    clients: of closed loops, a level each; not looked at where there are rates.
    rates: of open loops, requests a second.
    requests: of each level; None: as many as tell something.
    """

    clients: tuple[int, ...]
    rates: tuple[float, ...] = ()
    requests: int | None = None

    @property
    def connections(self) -> int:
        return MOST_AT_ONCE if self.rates else max(self.clients)


def measure(plan: Plan, ask: Ask, warm: Ask, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """The levels' figures.

    Args:
        warm: sends the request before all, which is not measured: an endpoint that is scaled to zero starts with it.

    Raises:
        RequestFailed: that one failed.
    """
    first = warm(time.monotonic(), 0)
    if first.error:
        raise RequestFailed(f"the request before the measurement failed: {first.error}", "Try `lmi deploy stream`.")
    levels = []
    number = 1
    for load in plan.rates or plan.clients:
        if plan.rates:
            requests = plan.requests or 50
            report(f"{requests} requests, {load:g} a second ...")
            levels.append(summary({"rate": load}, opened(ask, load, requests, number)))
        else:
            clients = int(load)
            requests = plan.requests or max(8, 4 * clients)
            report(f"{requests} requests, {clients} at once ...")
            levels.append(summary({"clients": clients}, closed(ask, clients, requests, number)))
        number += requests
    return levels
