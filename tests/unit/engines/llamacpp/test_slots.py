"""The slots of a llama-server: who runs, who waits, and whose turn is next."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from handler.engines.base import Silence
from handler.engines.llamacpp.slots import Slots


def test_groups_take_turns() -> None:
    """A group lets those in that waited when it began, and no later ones while another group waits."""

    async def play() -> list[str]:
        slots, order, leaving = Slots(2), list[str](), asyncio.Event()

        async def one(name: str) -> None:
            async with slots.occupy(Silence(), name[0]):
                order.append(name)
                await leaving.wait()
                await asyncio.sleep(0)

        tasks = []
        for name in ("a1", "a2", "b1", "a3", "b2", "b3", "a4", "c1"):
            tasks.append(asyncio.create_task(one(name)))
            await asyncio.sleep(0)
        assert order == ["a1", "a2"]
        tasks[7].cancel()
        leaving.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        return order

    assert asyncio.run(play()) == ["a1", "a2", "b1", "b2", "b3", "a3", "a4"]


def test_waiting_for_a_slot_is_no_silence_however_short_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])

    async def play() -> list[float]:
        slots, silence, found = Slots(1), Silence(), list[float]()

        async def second() -> None:
            async with slots.occupy(silence):
                clock[0] += 0.75  # the server computes
                found.append(silence.look())

        async with slots.occupy(Silence()):
            clock[0] += 0.25  # before it waits
            task = asyncio.create_task(second())
            for _ in range(5):
                await asyncio.sleep(0)
                clock[0] += 1.0
                found.append(silence.look())
        await task
        return found

    assert asyncio.run(play()) == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]


def test_a_cancelled_first_in_line_makes_room() -> None:
    async def play() -> list[str]:
        slots, order, leaving = Slots(3), list[str](), asyncio.Event()

        async def one(name: str) -> None:
            async with slots.occupy(Silence(), name[0]):
                order.append(name)
                await leaving.wait()

        tasks = []
        for name in ("a1", "b1", "a2"):
            tasks.append(asyncio.create_task(one(name)))
            await asyncio.sleep(0)
        tasks[1].cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert order == ["a1", "a2"], "a2 need not wait for a1"
        leaving.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        return order

    assert asyncio.run(play()) == ["a1", "a2"]


def test_however_requests_come_and_go_one_group_runs_within_the_limit_and_none_is_forgotten() -> None:
    draw = random.Random(21)

    async def play(count: int) -> None:
        slots, running, ended = Slots(count), list[str](), list[int]()

        async def one(number: int, group: str) -> None:
            async with slots.occupy(Silence(), group):
                running.append(group)
                try:
                    assert len(running) <= count
                    assert {*running} == {group}
                    for _ in range(draw.randrange(4)):
                        await asyncio.sleep(0)
                    if draw.random() < 0.2:
                        slots.limit = max(slots.limit - 1, 1)  # the cache is full
                finally:
                    running.remove(group)
                ended.append(number)

        tasks = []
        for number in range(20):
            tasks.append(asyncio.create_task(one(number, draw.choice("abc"))))
            if draw.random() < 0.5:
                await asyncio.sleep(0)
            if draw.random() < 0.2:
                draw.choice(tasks).cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results), results
        assert {*ended} == {number for number, task in enumerate(tasks) if not task.cancelled()}
        assert slots.limit == count, "after all have ended, the limit is the number of slots again"
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(count):
                await stack.enter_async_context(slots.occupy(Silence(), "d"))

    for count in (1, 2, 5):
        for _ in range(20):
            asyncio.run(play(count))
