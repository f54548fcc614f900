"""The thread of a model.py's functions: one call at a time, each with a limit from when it starts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from handler.core.errors import FormatterFailed
from handler.plugins.formatter_thread import FormatterThread
from tests.servers import wait_for

LIMIT = 0.5


@pytest.fixture
def thread() -> Iterator[FormatterThread]:
    found = FormatterThread(lambda call: None, LIMIT)
    yield found
    found.close()


def test_results_and_errors_come_back(thread: FormatterThread) -> None:
    assert thread.submit("f", max, 1, 2).result(30) == 2
    with pytest.raises(SystemExit):
        thread.submit("f", exit).result(30)
    assert thread.submit("f", max, 1, 2).result(30) == 2


def test_the_wait_for_the_thread_does_not_count(thread: FormatterThread) -> None:
    calls = [thread.submit("f", time.sleep, LIMIT / 5) for _ in range(7)]
    assert [call.result(30) for call in calls] == [None] * 7


def test_those_behind_a_hung_call_are_run_when_its_time_is_up(thread: FormatterThread) -> None:
    free = threading.Event()
    hung = thread.submit("the one", free.wait, 30)
    behind = [thread.submit("f", max, 1, number) for number in range(8)]
    with pytest.raises(FormatterFailed, match=r"the one did not end within 0.5 s"):
        hung.result(30)
    assert [call.result(30) for call in behind] == [1, 1, *range(2, 8)]
    free.set()


def _started_since(before: list[threading.Thread]) -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "formatter" and each not in before]


def test_never_two_at_once_whatever_ends_at_the_limit(thread: FormatterThread) -> None:
    """What was given up may go on; beyond that, one call runs at a time."""
    lock = threading.Lock()
    overlaps: list[int] = []

    def alone() -> None:
        if not lock.acquire(blocking=False):
            overlaps.append(1)
            return
        time.sleep(0.001)
        lock.release()

    before = threading.enumerate()
    for number in range(6):  # around the limit
        thread.submit("f", time.sleep, LIMIT * (0.9 + number / 25))
    for _ in range(200):
        last = thread.submit("f", alone)
    last.result(30)
    assert overlaps == []
    # The present one is left; none where the first has never been replaced.
    wait_for(lambda: len(_started_since(before)) <= 1, 10, "those that were given up go on")


def test_what_was_cancelled_is_not_run(thread: FormatterThread) -> None:
    ran: list[int] = []
    thread.submit("f", time.sleep, 0.1)
    assert thread.submit("f", ran.append, 1).cancel()
    thread.submit("f", ran.append, 2).result(30)
    assert ran == [2]
