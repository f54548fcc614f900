"""Two kinds of requests that are never inside together, whatever comes and goes."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from handler.engines.vllm.adapters import LoraExclusion


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 30)), max_size=60))
def test_kinds_never_meet_and_everybody_gets_in(events: list[tuple[bool, bool, int]]) -> None:
    turns = LoraExclusion()
    inside: dict[int, bool] = {}
    order: list[int] = []

    def start(key: int, kind: bool) -> None:
        inside[key] = kind
        order.append(key)
        assert len(set(inside.values())) == 1

    entered = []
    for number, (comes, kind, which) in enumerate(events):
        if comes:
            entered.append(number)
            turns.enter(number, kind, partial(start, number, kind))
        elif inside:
            gone = sorted(inside)[which % len(inside)]
            del inside[gone]
            assert turns.leave(gone) == []
    while inside:
        gone = next(iter(inside))
        del inside[gone]
        turns.leave(gone)
    assert order == entered, "all of them, in the order in which they came"


def test_one_that_waits_can_leave() -> None:
    turns = LoraExclusion()
    started: list[int] = []
    for key, kind in ((1, True), (2, False), (3, True)):
        turns.enter(key, kind, partial(started.append, key))
    turns.leave(2)
    turns.leave(1)
    assert started == [1, 3]


def test_one_that_cannot_start_is_named_and_the_next_one_comes() -> None:
    def fail() -> None:
        raise ValueError

    turns = LoraExclusion()
    started: list[int] = []
    turns.enter(1, True, partial(started.append, 1))
    turns.enter(2, False, fail)
    turns.enter(3, True, partial(started.append, 3))
    ((key, error),) = turns.leave(1)
    assert (key, type(error)) == (2, ValueError)
    assert started == [1, 3]


def test_leaving_without_a_turn_lets_those_in_who_fit() -> None:
    """A request that waits leaves, and was what kept its successors of the running kind out."""
    turns = LoraExclusion()
    started: list[int] = []
    for key, kind in ((1, True), (2, False), (3, True)):
        turns.enter(key, kind, partial(started.append, key))
    turns.leave(2)
    assert started == [1, 3]
