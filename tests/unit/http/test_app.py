"""Parts of the application that need no server."""

from __future__ import annotations

import asyncio
from unittest import mock

from handler.http.app import Budgeted


class Clock:
    """A clock that `asyncio.sleep` advances, and calls that cost CPU time by it."""

    def __init__(self) -> None:
        self.now = self.cpu = 0.0
        self.num_calls = 0

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    def call(self) -> bytes:
        self.cpu += 0.1
        self.num_calls += 1
        return b"%d" % self.num_calls


def test_a_costly_call_takes_at_most_its_share_and_is_never_older_than_its_caller() -> None:
    async def story() -> None:
        clock = Clock()
        paced = Budgeted(clock.call, lambda: clock.now, lambda: clock.cpu)
        with mock.patch("handler.http.app.asyncio.sleep", clock.sleep):
            for number in range(1, 21):
                clock.now += 0.001
                assert await paced.get() == b"%d" % number
        assert 30 < clock.now < 40, "20 calls take 2 s, which is 5 % of 40 s; 0.25 s were saved up"

    asyncio.run(story())


def test_callers_that_wait_share_one_call() -> None:
    async def story() -> None:
        clock, ended = Clock(), asyncio.Event()

        async def sleep(seconds: float) -> None:
            await ended.wait()
            clock.now += seconds

        paced = Budgeted(clock.call, lambda: clock.now, lambda: clock.cpu)
        with mock.patch("handler.http.app.asyncio.sleep", sleep):
            for _ in range(3):
                clock.now += 0.001
                await paced.get()
            clock.now += 0.001
            waiting = [asyncio.ensure_future(paced.get()) for _ in range(100)]
            for _ in range(3):
                await asyncio.tasks.sleep(0)
            assert clock.num_calls == 3
            ended.set()
            assert {*await asyncio.gather(*waiting)} == {b"4"}

    asyncio.run(story())


def test_a_result_counts_from_the_beginning_of_its_call() -> None:
    """A caller at the time at which a call ended needs a call of its own."""

    async def story() -> None:
        clock = Clock()

        def call() -> bytes:
            clock.now += 1
            return clock.call()

        paced = Budgeted(call, lambda: clock.now, lambda: clock.cpu)
        assert [await paced.get() for _ in range(2)] == [b"1", b"2"]

    asyncio.run(story())
