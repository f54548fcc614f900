"""Requests sent as a load says: so many clients, each with one request under way, or so many requests a second."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from deploy.bench.asking import Ask, Result

MOST_AT_ONCE = 512  # threads of an open loop


def closed(ask: Ask, clients: int, requests: int, first: int = 0) -> list[Result]:
    """`clients` at once, each sending its next request when it has its answer, until `requests` are sent.

    Args:
        first: the number of the first request.
    """
    numbers = itertools.count(first)
    lock = threading.Lock()

    def client() -> list[Result]:
        results: list[Result] = []
        while True:
            with lock:
                number = next(numbers)
            if number >= first + requests:
                return results
            results.append(ask(time.monotonic(), number))

    with ThreadPoolExecutor(clients) as pool:
        return [result for found in pool.map(lambda _: client(), range(clients)) for result in found]


def opened(
    ask: Ask, rate: float, requests: int, first: int = 0, sleep: Callable[[float], None] = time.sleep
) -> list[Result]:
    """`rate` requests a second, whether answers come or not, at random times that are the same in every run."""
    chosen = random.Random(first)
    due = time.monotonic()
    with ThreadPoolExecutor(min(requests, MOST_AT_ONCE)) as pool:
        pending = []
        for number in range(first, first + requests):
            sleep(max(0.0, due - time.monotonic()))
            pending.append(pool.submit(ask, due, number))
            due += chosen.expovariate(rate)
        return [one.result() for one in pending]
