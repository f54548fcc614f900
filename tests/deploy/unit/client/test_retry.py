"""When a request is tried again, by a clock of ours."""

from __future__ import annotations

import pytest

from deploy.client import ModelFailed, NoCapacity, NotStarted, Patience, Throttled
from deploy.client.runtime import with_retries


class Clock:
    """Time passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def tried(error: Exception, patience: Patience) -> Clock:
    clock = Clock()

    def attempt() -> None:
        raise error

    with pytest.raises(type(error)):
        with_retries(attempt, patience, clock=clock, sleep=clock.sleep)
    return clock


def test_pauses_grow_up_to_the_longest() -> None:
    pauses = tried(Throttled("x"), Patience(busy=300, first=1, longest=8)).pauses
    for pause, most in zip(pauses[:6], [1, 2, 4, 8, 8, 8], strict=True):
        assert most / 2 <= pause <= most
    assert max(pauses) <= 8


def test_all_ends_within_the_limit_of_its_kind() -> None:
    patience = Patience(busy=30, cold=600)
    assert tried(Throttled("x"), patience).now == pytest.approx(130)
    assert tried(NoCapacity("x"), patience).now == pytest.approx(700)


def test_what_may_have_begun_is_not_tried_again() -> None:
    assert tried(ModelFailed("x"), Patience()).pauses == []


def test_an_answer_ends_it_and_every_pause_was_reported() -> None:
    clock, seen = Clock(), []
    outcomes = iter([Throttled("one"), NoCapacity("two")])

    def attempt() -> str:
        if (error := next(outcomes, None)) is not None:
            raise error
        return "answer"

    def report(error: NotStarted, pause: float) -> None:
        seen.append((str(error), pause))

    assert with_retries(attempt, Patience(), report, clock=clock, sleep=clock.sleep) == "answer"
    assert seen == [("one", clock.pauses[0]), ("two", clock.pauses[1])]
