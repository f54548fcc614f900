"""Entries of a queue that API keys share: owners take turns, their flows do, and the longest gives way."""

from __future__ import annotations

import threading
from contextlib import ExitStack, suppress

import pytest

from handler.core.errors import Overloaded
from handler.core.fair_queue import FairQueue, OwnerCounts, OwnerTurns
from handler.scheduler.batcher import OwnerQueues


def taken(queue: FairQueue[str]) -> list[str | None]:
    return [queue.get() for _ in range(len(queue))]


def test_flows_take_turns_and_each_keeps_its_order() -> None:
    queue = FairQueue[str]()
    for flow, item in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("b", "b2"), ("c", "c1")):
        assert queue.put(flow, item) is None
    assert taken(queue) == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert not queue


def test_a_flow_that_has_had_its_turn_does_not_come_first_again() -> None:
    queue = FairQueue[str]()
    for item in ("a1", "a2", "a3"):
        queue.put("a", item)
    assert queue.get() == "a1"
    queue.put("b", "b1")
    queue.put("a", "a4")
    assert taken(queue) == ["a2", "b1", "a3", "a4"]


def test_beyond_its_capacity_the_longest_flow_loses_its_newest() -> None:
    queue = FairQueue[str](3)
    assert [queue.put("a", f"a{n}") for n in range(4)] == [None, None, None, "a3"]
    assert queue.put("b", "b0") == "a2"
    assert queue.put("c", "c0") == "a1"
    assert queue.put("d", "d0") == "d0", "none has more than one"
    assert taken(queue) == ["a0", "b0", "c0"]


def test_what_is_dropped_comes_no_more() -> None:
    queue = FairQueue[str]()
    for flow, item in (("a", "a1"), ("b", "b1"), ("a", "a2")):
        queue.put(flow, item)
    queue.drop(lambda item: item in ("b1", "a1"))
    assert len(queue) == 1
    assert taken(queue) == ["a2"]


def test_who_waits_goes_when_it_is_closed() -> None:
    queue, found = FairQueue[str](), list[str | None]()
    threads = [threading.Thread(target=lambda: found.append(queue.get())) for _ in range(3)]
    for thread in threads:
        thread.start()
    queue.put("a", "a1")
    queue.close()
    for thread in threads:
        thread.join(10)
    assert len(found) == 3
    assert set(found) <= {"a1", None}
    assert queue.get() is None


def test_an_owner_with_many_flows_has_one_turn() -> None:
    queue = FairQueue[str]()
    for number in range(4):
        queue.put(number, f"a{number}", "a")
    queue.put(0, "b0", "b")
    queue.put(0, "b1", "b")
    assert taken(queue) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_beyond_its_capacity_the_owner_with_most_loses_the_newest_of_its_longest_flow() -> None:
    queue = FairQueue[str](4)
    for flow, item in (("x", "a0"), ("y", "a1"), ("y", "a2"), ("z", "a3")):
        assert queue.put(flow, item, "a") is None
    assert queue.put("x", "b0", "b") == "a2"
    assert queue.put("x", "b1", "b") in ("a1", "a3", "a0")
    assert queue.put("x", "b2", "b") == "b2", "the other owner has as many"
    assert len(queue) == 4


def test_nobody_waits_longer_than_a_time_limit() -> None:
    assert FairQueue[str]().get(0.01) is None


def test_a_new_owner_reduces_the_share_that_each_has_of_a_full_queue() -> None:
    queue = FairQueue[str]()
    assert queue.has_room(4, "a")
    for number in range(5):
        queue.put(0, f"a{number}", "a")
    assert not queue.has_room(4, "a")
    for number in range(2):
        assert queue.has_room(4, "b")
        queue.put(0, f"b{number}", "b")
    assert not queue.has_room(4, "b")
    assert queue.has_room(4, "c")
    queue.put(0, "c0", "c")
    assert not queue.has_room(4, "c")


def test_a_newcomer_counts_itself_among_the_owners() -> None:
    queue = FairQueue[str]()
    queue.put(0, "a0", "a")
    assert not queue.has_room(1, "b"), "half of one entry is none"


def test_an_owner_whose_turn_ends_comes_after_all_others() -> None:
    turns = OwnerTurns[str, list[int]](list)
    for owner in ("ann", "bob"):
        turns[owner] += [1, 2]
    turns["ann"].pop()
    turns.end_turn("ann")
    turns["carol"].append(1)
    assert list(turns) == ["bob", "ann", "carol"]


def test_an_owner_without_entries_has_no_turn() -> None:
    turns = OwnerTurns[str, list[int]](list)
    for owner in ("ann", "bob", "carol"):
        turns[owner].append(1)
    turns["ann"].clear()
    turns.end_turn("ann")
    turns["bob"].clear()
    turns.drop_empty("bob")
    turns.drop_empty("carol")
    assert list(turns) == ["carol"]


def test_of_owners_with_as_much_the_one_whose_turn_is_last_loses_in_each_queue() -> None:
    fair, queues = FairQueue[int](capacity=6), OwnerQueues[int]()
    for number, owner in enumerate("ababab"):
        fair.put("flow", number, owner)
        queues.add(number, 0, number, owner)
    assert queues.newest_of_largest("c") == fair.put("flow", 6, "c") == 5


def test_operations_are_counted_for_as_long_as_they_run() -> None:
    counts = OwnerCounts(4, "too many")
    with ExitStack() as held:
        for _ in range(4):
            held.enter_context(counts.hold("a"))
        with pytest.raises(Overloaded, match="too many"), counts.hold("a"):
            pass
        with counts.hold("b"), counts.hold("b"), pytest.raises(Overloaded, match="too many"), counts.hold("b"):
            pass
        with suppress(ZeroDivisionError), counts.hold("b"):
            raise ZeroDivisionError
        with counts.hold("b"), counts.hold("b"), pytest.raises(Overloaded), counts.hold("a"):
            pass
    with ExitStack() as held:
        for _ in range(4):
            held.enter_context(counts.hold("a"))
        with counts.hold("b"), counts.hold("c"):
            pass
