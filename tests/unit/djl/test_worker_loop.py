"""DJL's worker's loop: what runs within a step, and how long one waits. No test waits for longer than it must."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from handler.djl import worker_loop
from handler.djl.worker_loop import WorkerLoop

LONG = 600.0


class Driver:
    """An engine's side of a pipe; a step reads what the engine wrote."""

    def __init__(self) -> None:
        self.fd, self._writer = os.pipe()
        self.steps = 0

    def say(self) -> None:
        os.write(self._writer, b".")

    def step(self) -> None:
        os.read(self.fd, 1)
        self.steps += 1

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._writer)


class Worker:
    """A loop that watches an engine, and whose clock for the time of its last run stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(worker_loop, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.driver: Any = Driver()
        self.loop = WorkerLoop()
        self.asyncio = self.loop.run(self._begin())
        self.ran: list[str] = []

    async def _begin(self) -> asyncio.AbstractEventLoop:
        found = asyncio.get_running_loop()
        found.add_reader(self.driver.fd, self.driver.step)
        return found

    def due(self, seconds: float | None = None, then: Callable[[], object] = lambda: None) -> None:
        """Have a callback in the loop, at once or in so many seconds."""

        def run() -> None:
            self.ran.append("callback")
            then()

        if seconds is None:
            self.asyncio.call_soon(run)
        else:
            self.asyncio.call_later(seconds, run)

    def close(self) -> None:
        self.loop.close()
        self.driver.close()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    made = Worker(monkeypatch)
    yield made
    made.close()


@pytest.mark.parametrize("later", [0.0, 0.1])
def test_an_engine_that_speaks_is_heard_without_a_run_of_the_loop(worker: Worker, later: float) -> None:
    worker.driver.say()
    worker.due()
    worker.now += later
    worker.loop.step(worker.driver, LONG)
    assert (worker.driver.steps, worker.ran) == (1, [])


def test_the_loop_runs_once_a_period(worker: Worker) -> None:
    worker.driver.say()
    worker.due()
    worker.now += 0.11
    worker.loop.step(worker.driver, 0)
    assert (worker.driver.steps, worker.ran) == (1, ["callback"])
    worker.driver.say()
    worker.due()
    worker.loop.step(worker.driver, 0)
    assert (worker.driver.steps, worker.ran) == (2, ["callback"])


def test_the_loop_runs_where_the_engine_is_silent(worker: Worker) -> None:
    worker.due()
    worker.loop.step(worker.driver, 0)
    assert (worker.driver.steps, worker.ran) == (0, ["callback"])


def test_the_loop_runs_where_another_speaks_beside_the_engine(worker: Worker) -> None:
    other = Driver()
    worker.asyncio.add_reader(other.fd, other.step)
    worker.driver.say()
    other.say()
    worker.loop.step(worker.driver, LONG)
    assert (worker.driver.steps, other.steps) == (1, 1)
    worker.asyncio.remove_reader(other.fd)
    other.close()


def test_without_an_engine_a_step_runs_the_loop_until_it_is_stopped(worker: Worker) -> None:
    worker.driver.say()
    nobody: Any = SimpleNamespace(fd=None)
    worker.due(0.001, then=worker.loop.stop)
    worker.loop.step(nobody, LONG)
    assert worker.ran == ["callback"]


def test_without_an_engine_a_step_of_no_time_does_not_wait(worker: Worker) -> None:
    nobody: Any = SimpleNamespace(fd=None)
    worker.due(LONG)
    worker.loop.step(nobody, 0)
    assert worker.ran == []


def test_a_wait_ends_by_itself_whatever_was_waited_for_before(worker: Worker) -> None:
    worker.due(then=worker.loop.stop)
    worker.loop.wait(LONG)
    begin = worker.asyncio.time()
    worker.loop.wait(0.002)
    assert begin + 0.002 <= worker.asyncio.time() < begin + LONG


def test_a_wait_is_not_ended_by_the_timer_of_a_shorter_one(worker: Worker) -> None:
    worker.due(then=worker.loop.stop)
    worker.loop.wait(0.001)
    begin = worker.asyncio.time()
    worker.loop.wait(0.01)
    assert worker.asyncio.time() >= begin + 0.01


def test_what_is_waited_for_is_asked_for_at_each_stop(worker: Worker) -> None:
    asked: list[bool] = []

    def done() -> bool:
        asked.append(True)
        worker.due(then=worker.loop.stop)
        return len(asked) == 3

    assert worker.loop.wait_until(done, LONG)
    assert len(asked) == 3


def test_it_is_not_waited_for_any_longer(worker: Worker) -> None:
    """It is asked once more after the last run."""
    asked: list[float] = []

    def done() -> bool:
        asked.append(worker.now)
        worker.now += 1
        worker.due(then=worker.loop.stop)
        return False

    assert not worker.loop.wait_until(done, 2)
    assert asked == [100.0, 101.0]


def test_a_loop_that_is_looked_after_runs_between_calls() -> None:
    loop, ran = WorkerLoop(), threading.Event()

    async def run_in_later_passes() -> None:
        soon: Callable[..., object] = asyncio.get_running_loop().call_soon
        soon(soon, soon, soon, ran.set)

    with loop.lock:
        loop.run(run_in_later_passes())
        assert not ran.is_set()
        watch = threading.Thread(target=loop.look_after, args=(0.001,))
        watch.start()
        assert not ran.wait(0.02), "nor within a call"
    assert ran.wait(30)
    with loop.lock:
        loop.close()
    watch.join(30)
    assert not watch.is_alive()


def test_a_loop_gives_its_tasks_results_and_errors() -> None:
    async def answer(value: int) -> int:
        await asyncio.sleep(0)
        if not value:
            raise ValueError("none")
        return value

    loop = WorkerLoop()
    assert loop.run(answer(3)) == 3
    with pytest.raises(ValueError, match="none"):
        loop.run(answer(0))
    assert loop.wait_until(lambda: True, 0.0) is True
    assert loop.wait_until(lambda: False, 0.0) is False
    loop.close()
