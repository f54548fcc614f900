"""Loads: how many requests are under way, and when they are sent."""

from __future__ import annotations

import threading
import time

from deploy.bench.asking import Result
from deploy.bench.load import closed, opened


def test_a_closed_loop_has_so_many_under_way() -> None:
    lock, together = threading.Lock(), threading.Barrier(3, timeout=10)
    numbers, active, most = [], 0, 0

    def ask(start: float, number: int) -> Result:
        nonlocal active, most
        with lock:
            numbers.append(number)
            active += 1
            most = max(most, active)
        together.wait()  # only three at once get past it
        with lock:
            active -= 1
        return Result(start, (), start, number)

    results = closed(ask, clients=3, requests=6, first=10)
    assert sorted(numbers) == sorted(result.tokens for result in results) == list(range(10, 16))
    assert most == 3


def test_an_open_loop_does_not_wait_for_answers() -> None:
    release, under_way = threading.Event(), threading.Semaphore(0)

    def ask(start: float, number: int) -> Result:
        under_way.release()
        assert release.wait(10)
        return Result(start, (), time.monotonic(), number)

    found: list[Result] = []
    running = threading.Thread(target=lambda: found.extend(opened(ask, 1000.0, 5, first=1)))
    running.start()
    for _ in range(5):
        assert under_way.acquire(timeout=10)
    release.set()
    running.join(10)
    assert [result.tokens for result in found] == [1, 2, 3, 4, 5]
    starts = [result.start for result in found]
    assert starts == sorted(starts)


def test_an_open_loops_times_are_those_that_were_due() -> None:
    pauses: list[float] = []
    results = opened(lambda start, number: Result(start, (), start, 1), 10.0, 200, sleep=pauses.append)
    mean = (results[-1].start - results[0].start) / 199
    assert 0.07 < mean < 0.13
    assert len(pauses) == 200
