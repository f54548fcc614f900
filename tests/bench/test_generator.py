"""The load generator: how many requests are under way, and when they are sent."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from proof.bench.client import Closed, Open, Result, closed_loop, open_loop, poisson_times
from tests.servers import PATIENCE


def test_a_closed_loop_has_so_many_under_way() -> None:
    numbers: list[int] = []
    active = most = 0

    async def ask(number: int) -> Result:
        nonlocal active, most
        numbers.append(number)
        active += 1
        most = max(most, active)
        await asyncio.sleep(0)
        active -= 1
        return Result(0.0, (), 0.0, counted=number)

    shared = iter(range(10, 16))
    results = asyncio.run(closed_loop(ask, [shared] * 3))
    assert sorted(numbers) == sorted(result.num_tokens for result in results) == list(range(10, 16))
    assert most == 3


def test_a_client_sends_its_next_request_after_its_last_answer() -> None:
    under_way: set[int] = set()

    async def ask(number: int) -> Result:
        client = number % 2
        assert client not in under_way
        under_way.add(client)
        await asyncio.sleep(0.001)
        under_way.remove(client)
        return Result(0.0, (), 0.0, counted=number)

    load = Closed(clients=2, requests=3)
    results = asyncio.run(closed_loop(ask, [load.numbers(client, 0.0) for client in range(2)]))
    assert [result.num_tokens for result in results] == [0, 2, 4, 1, 3, 5]


def test_a_closed_loop_goes_on_after_a_failure() -> None:
    async def ask(number: int) -> Result:
        return Result(0.0, (), 0.0, "status 503" if number == 0 else "")

    results = asyncio.run(closed_loop(ask, [Closed(1, requests=3).numbers(0, 0.0)]))
    assert [result.error for result in results] == ["status 503", "", ""]


def test_a_closed_loop_with_seconds_ends_with_them() -> None:
    begin = time.monotonic()
    numbers = Closed(clients=4, seconds=0.02).numbers(1, begin)
    assert [next(numbers), next(numbers)] == [1, 5]
    time.sleep(0.03)
    assert list(numbers) == []


def test_an_open_loop_does_not_wait_for_answers() -> None:
    async def run() -> list[Result]:
        release = asyncio.Event()
        under_way = 0

        async def ask(number: int) -> Result:
            nonlocal under_way
            under_way += 1
            if under_way == 5:  # only all five at once get past it
                release.set()
            await asyncio.wait_for(release.wait(), PATIENCE)
            return Result(0.0, (), time.monotonic(), counted=number)

        return await open_loop(ask, zip(range(1, 6), poisson_times(1000.0, seed=1), strict=False), time.monotonic())

    results = asyncio.run(run())
    assert [result.num_tokens for result in results] == [1, 2, 3, 4, 5]
    starts = [result.start for result in results]
    assert starts == sorted(starts)


def test_a_result_of_an_open_loop_starts_when_it_was_due() -> None:
    async def ask(number: int) -> Result:
        return Result(-1.0, (), time.monotonic())

    begin = time.monotonic() - 5  # late, as a generator under load is
    results = asyncio.run(open_loop(ask, [(0, 0.5), (1, 1.5)], begin))
    assert [result.start for result in results] == [begin + 0.5, begin + 1.5]


def test_arrivals_are_random_and_the_same_in_every_run() -> None:
    times = list(itertools.islice(poisson_times(10.0, seed=3), 200))
    assert times == list(itertools.islice(poisson_times(10.0, seed=3), 200))
    assert 0.07 < times[-1] / 200 < 0.13
    assert times == sorted(times)
    due = Open(rate=10.0, seconds=5.0, seed=3).due()
    assert due == times[: len(due)]
    assert due[-1] <= 5.0 < times[len(due)]
    assert Open(rate=2, seconds=2, poisson=False).due() == pytest.approx([0.5, 1.0, 1.5, 2.0])
