"""Turns at slots, and quotas with room for small requests."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

import pytest

from handler.core.errors import Overloaded
from handler.core.framing import dumps
from handler.serving import large_bodies
from handler.serving.large_bodies import LargeBodies
from handler.serving.quota import Quota, Share
from handler.serving.turns import Flow, Turns, TurnThreads
from tests.doubles.steps import steps
from tests.servers import PATIENCE


def test_small_requests_have_room_that_large_ones_cannot_take() -> None:
    quota = Quota(10, spare=4, small=2, words="full")
    quota.change(0, 8)
    quota.change(8, 10)
    for before, after in ((0, 3), (2, 3)):
        with pytest.raises(Overloaded, match="full"):
            quota.change(before, after)
    quota.change(0, 2)
    quota.change(0, 2)
    with pytest.raises(Overloaded):
        quota.change(0, 1)
    for before in (10, 2, 2):
        quota.change(before, 0)
    quota.change(0, 10)
    assert quota.taken == 10


def test_a_request_of_any_amount_leaves_the_small_ones_their_room() -> None:
    quota = Quota(10, spare=4, small=2, words="full", beside=4)
    huge, small = Share(quota), [Share(quota) for _ in range(3)]
    huge.take(1_000)
    for one in small[:2]:
        one.take(1)
        one.take(1)
    with pytest.raises(Overloaded):
        small[2].take(1)
    with pytest.raises(Overloaded):
        small[0].take(1)  # it is small no longer
    huge.set(9)
    small[2].take(1)
    for one in (huge, *small):
        one.give_back()
    huge.take(10)
    assert quota.taken == 10


@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (100, 1), (10, 2, 1), (9, 1, 1, 2)])
def test_an_owner_that_takes_all_it_can_leaves_room_for_anothers_small_requests(sizes: tuple[int, ...]) -> None:
    quota = Quota(10, spare=4, small=2, words="full", beside=4)
    taken = [Share(quota.of("ann")) for _ in range(80)]
    for share, size in zip(taken, [*itertools.islice(itertools.cycle(sizes), 40), *[1] * 40], strict=True):
        with contextlib.suppress(Overloaded):
            share.take(size)
    with pytest.raises(Overloaded):
        Share(quota.of("ann")).take(1)
    with pytest.raises(Overloaded):
        Share(quota.of("bob")).take(3)
    other = Share(quota.of("bob"))
    other.take(2)
    for share in (*taken, other):
        share.close()
    assert (quota.taken, vars(quota)["_taken_by_owner"]) == (0, {})
    Share(quota.of("ann")).take(10)


def test_an_owners_large_request_leaves_room_for_its_own_small_ones() -> None:
    quota = Quota(10, spare=4, small=2, words="full", beside=4)
    huge, small = Share(quota.of("ann")), Share(quota.of("ann"))
    huge.take(1_000)
    small.take(2)


def test_everyone_may_take_the_whole_quota() -> None:
    quota = Quota(10, spare=4, small=2, words="full")
    shares = [Share(quota.of("")) for _ in range(7)]
    for share in shares:
        share.take(2)


def test_a_closed_share_stays_empty() -> None:
    """A writer or a thread of a request that has ended may still count."""
    quota = Quota(10, spare=0, small=2, words="full")
    with Share(quota) as share:
        share.take(5)
    share.set(7)
    share.take(3)
    share.give_back(2)
    share.take(11)
    assert (share.size, quota.taken) == (0, 0)


def test_a_part_of_a_share_can_be_given_back() -> None:
    quota = Quota(10, spare=0, small=0, words="full")
    share = Share(quota)
    share.take(8)
    share.give_back(3)
    assert (share.size, quota.taken) == (5, 5)
    share.give_back()
    assert (share.size, quota.taken) == (0, 0)


def test_one_request_may_take_any_amount_beside_small_ones() -> None:
    quota = Quota(10, spare=4, small=2, words="full", beside=4)
    little, much, more = Share(quota), Share(quota), Share(quota)
    little.take(4)
    much.take(9)
    much.take(20)
    with pytest.raises(Overloaded):
        more.take(3)
    much.set(8)
    assert (much.size, quota.taken) == (8, 12)
    more.take(2)
    with pytest.raises(Overloaded):
        little.take(1)
    del much
    with more:
        more.set(6)
    little.set(0)
    assert quota.taken == 0


def in_turns(kinds: Callable[[str], int], use: Callable[[Turns, list[str]], Coroutine[Any, Any, None]]) -> list[str]:
    """What is done, in its order, at one slot."""
    done: list[str] = []
    asyncio.run(use(Turns(1, kinds), done))
    return done


async def work(turns: Turns, done: list[str], flow: Flow, name: str, cost: float = 1.0, kind: str = "any") -> None:
    async with turns.turn(flow, cost, kind):
        for _ in range(3):
            await asyncio.sleep(0)
        done.append(name)


def test_requests_take_turns() -> None:
    async def use(turns: Turns, done: list[str]) -> None:
        one, two, small = Flow(), Flow(), Flow()
        tasks = [asyncio.create_task(work(turns, done, one, "1", 10)) for _ in range(3)]
        tasks += [asyncio.create_task(work(turns, done, two, "2", 10)) for _ in range(3)]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(work(turns, done, small, "small")))
        await asyncio.gather(*tasks)

    assert in_turns(lambda kind: 1, use) == ["1", "small", "2", "1", "2", "1", "2"]


def test_who_leaves_the_queue_takes_no_turn() -> None:
    async def use(turns: Turns, done: list[str]) -> None:
        tasks = [asyncio.create_task(work(turns, done, Flow(), str(number))) for number in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()  # it waits
        while not tasks[0].done():
            await asyncio.sleep(0)
        tasks[2].cancel()  # it has its slot, perhaps without knowing
        await asyncio.gather(*tasks, return_exceptions=True)
        await work(turns, done, Flow(), "free")

    done = in_turns(lambda kind: 1, use)
    assert done in (["0", "3", "free"], ["0", "2", "3", "free"])


def test_a_kind_has_no_more_slots_than_its_own() -> None:
    async def use(turns: Turns, done: list[str]) -> None:
        async with turns.turn(Flow(), 1, "slow"):
            slow = asyncio.create_task(work(turns, done, Flow(), "slow", 0.1, "slow"))
            await work(turns, done, Flow(), "quick", 5, "quick")
        await slow

    done: list[str] = []
    asyncio.run(use(Turns(2, lambda kind: 1 if kind == "slow" else 2), done))
    assert done == ["quick", "slow"]


def test_the_slots_of_a_kind_are_limited_while_its_work_comes_and_goes() -> None:
    running, counts = list[int](), list[int]()

    async def use(turns: Turns, number: int) -> None:
        async with turns.turn(Flow(), 1, "slow"):
            running.append(number)
            counts.append(len(running))
            for _ in range(1 + number % 3):
                await asyncio.sleep(0)
            running.remove(number)

    async def story() -> None:
        turns = Turns(4, lambda kind: 2 if kind == "slow" else 4)
        for _ in range(3):  # the second time, no work of this kind is left from the first
            await asyncio.gather(*(use(turns, number) for number in range(8)))
            assert max(counts) == 2
            counts.clear()

    asyncio.run(asyncio.wait_for(story(), PATIENCE))


class Machine:
    """Slots, and a meter that is told what each work takes; the one that began first ends first."""

    def __init__(self, slots: int) -> None:
        self.turns = Turns(slots, lambda kind: slots)
        self.began: list[str] = []
        self._running: list[tuple[Flow, float, float]] = []

    def ask(self, owner: str, told: float, takes: float, flow: Flow | None = None) -> None:
        flow = flow or Flow(owner)

        def begin() -> None:
            self.began.append(owner)
            self._running.append((flow, told, takes))

        self.turns.enter(flow, told, "any", Future(), begin)

    def end(self, count: int = 1) -> None:
        for _ in range(count):
            flow, told, takes = self._running.pop(0)
            self.turns.charge(flow, takes - told)
            self.turns.leave(flow, told, "any")


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("images", [1, 4])
def test_hostile_work_of_one_owner_delays_anothers_by_one_work_at_most(slots: int, images: int) -> None:
    """60 requests, whose headers promise little."""
    machine = Machine(slots)
    for _ in range(60):
        flow = Flow("hostile")
        for _ in range(images):
            machine.ask("hostile", 0.01, 0.2, flow)
    for number in range(20):
        machine.end(number % 3)
        machine.ask("other", 0.05, 0.05)
        before = len(machine.began)
        machine.end(2)
        assert "other" in machine.began[before : before + 2]


def test_owners_share_the_time_not_the_number() -> None:
    machine = Machine(1)
    for _ in range(100):
        machine.ask("long", 0.01, 0.4)
        machine.ask("short", 0.01, 0.1)
    machine.end(50)
    assert machine.began[:50].count("long") == 10


def test_nobody_saves_turns_up_and_old_use_is_forgotten() -> None:
    machine = Machine(1)
    for _ in range(100):
        machine.ask("first", 0.1, 0.1)
    machine.end(50)
    for _ in range(10):
        machine.ask("later", 0.1, 0.1)
    before = len(machine.began)
    machine.end(20)
    assert machine.began[before:].count("later") == 10
    machine.end(40)
    assert not machine.turns._accounts
    for owner in ("other", "first", "other", "first"):
        machine.ask(owner, 0.1, 0.1)
    machine.end(4)
    assert machine.began[-4:] == ["other", "first", "other", "first"]


def test_what_a_header_told_too_much_is_paid_back() -> None:
    machine = Machine(1)
    machine.ask("honest", 1.0, 0.2)
    machine.ask("other", 0.9, 0.9)
    machine.ask("honest", 0.3, 0.3)
    machine.end(3)
    assert machine.began == ["honest", "honest", "other"]


def test_what_a_header_told_too_much_puts_no_other_owner_behind() -> None:
    machine = Machine(3)
    for _ in range(4):
        machine.ask("hostile", 10, 0.3)
    for _ in range(60):
        machine.ask("hostile", 0.01, 0.1)
    machine.end(6)
    machine.ask("other", 0.01, 0.01)
    before = len(machine.began)
    machine.end(2)
    assert "other" in machine.began[before:]


def test_threads_take_what_is_small_first() -> None:
    threads, free, done = TurnThreads(1, 1, "test"), threading.Event(), list[str]()
    first = threads.submit(lambda: free.wait(PATIENCE), 1000)
    later = [threads.submit(partial(done.append, str(cost)), cost) for cost in (500, 400, 2, 300, 1)]
    later[1].cancel()
    free.set()
    assert first.result(PATIENCE)
    for future in (later[0], *later[2:]):
        future.result(PATIENCE)
    assert done == ["1", "2", "300", "500"]
    threads.shutdown()


def test_large_bodies_that_take_long_leave_a_thread_to_quick_ones() -> None:
    bodies, free = LargeBodies(), threading.Event()
    slow = [bodies.submit(1 << 30, free.wait, PATIENCE) for _ in range(4)]
    assert bodies.submit(1, lambda: "quick").result(PATIENCE) == "quick"
    free.set()
    assert all(one.result(PATIENCE) for one in slow)
    bodies.close()


def test_a_large_bodys_texts_and_numbers_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else their unpickling would hold up all other requests."""
    monkeypatch.setattr(gc, "disable", int)
    body = dumps({"text": "a" * 100_000, "numbers": [1.5] * 100_000})
    *parts, rest = large_bodies.read_parts(large_bodies.BodyForm(plain=False, unique_keys=False), memoryview(body))
    assert [sum(len(piece) for _, piece in part) for part in parts] == [100_000, 1 << 16, 100_000 - (1 << 16)]
    assert len(rest) < 1_000


def test_threads_hand_over_results_and_errors_and_keep_nothing() -> None:
    class Result:
        pass

    threads = TurnThreads(2, 1, "test")
    gc.disable()
    try:
        result = threads.submit(Result, 1).result(PATIENCE)
        gone = weakref.ref(result)
        assert isinstance(threads.submit(lambda: 1 / 0, 1).exception(PATIENCE), ZeroDivisionError)
        assert threads.submit(lambda: "after", 1).result(PATIENCE) == "after"
        del result
        assert gone() is None
    finally:
        gc.enable()
    threads.shutdown()


def test_what_waits_at_the_end_is_cancelled() -> None:
    threads, free = TurnThreads(1, 1, "test"), threading.Event()
    running = threads.submit(lambda: free.wait(PATIENCE), 1)
    waiting = [threads.submit(lambda: True, 1) for _ in range(3)]
    threads.shutdown()
    free.set()
    assert running.result(PATIENCE)
    for future in waiting:
        with pytest.raises(CancelledError):
            future.result(PATIENCE)
    with pytest.raises(CancelledError):
        threads.submit(lambda: True, 1).result(PATIENCE)


def wait_for_turns(count: int) -> None:
    """Make so many calls that wait together."""
    threads, begin = TurnThreads(2, 2, "turns"), threading.Event()
    held: list[Future[Any]] = [threads.submit(begin.wait, 1.0) for _ in range(2)]
    waiting = [threads.submit(int, 1.0, slow=index % 3 == 0) for index in range(count)]
    begin.set()
    for one in (*held, *waiting):
        one.result(PATIENCE)
    threads.shutdown()


def test_the_work_of_turns_is_linear_in_those_who_wait() -> None:
    assert steps(lambda: wait_for_turns(800)) < 6 * steps(lambda: wait_for_turns(200))


def test_the_end_cancels_whoever_waits() -> None:
    threads, begin = TurnThreads(2, 2, "turns"), threading.Event()
    held = [threads.submit(begin.wait, 1.0) for _ in range(2)]
    waiting = [threads.submit(int, 1.0) for _ in range(3_000)]
    threads.shutdown()
    begin.set()
    assert [one.result(PATIENCE) for one in held] == [True, True]
    assert all(one.cancelled() for one in waiting)
    assert threads.submit(int, 1.0).cancelled()


def test_what_is_cancelled_while_all_slots_are_taken_is_let_go() -> None:
    threads, begin = TurnThreads(1, 1, "turns"), threading.Event()
    held = threads.submit(begin.wait, 1.0)

    class Body:
        def __call__(self) -> None: ...

    kept = []
    for _ in range(1_000):
        body = Body()
        kept.append(weakref.ref(body))
        threads.submit(body, 1.0).cancel()
    del body
    gc.collect()
    assert sum(one() is not None for one in kept) < 100
    begin.set()
    assert held.result(PATIENCE)
    assert threads.submit(lambda: 3, 1.0).result(PATIENCE) == 3
    threads.shutdown()


def test_what_is_set_to_the_same_or_less_is_never_refused() -> None:
    quota = Quota(10, spare=4, small=2, words="full")
    quota.change(0, 10)
    for _ in range(2):
        quota.change(0, 2)
    quota.change(10, 10)
    quota.change(10, 9)
    assert quota.taken == 13
    with pytest.raises(Overloaded):
        quota.change(9, 10)


def test_what_is_told_large_has_no_spare_room_whatever_its_amount() -> None:
    quota = Quota(2, spare=2, small=1, words="full")
    for _ in range(2):
        quota.change(0, 1, large=True)
    with pytest.raises(Overloaded):
        quota.change(0, 1, large=True)
    quota.change(0, 1, large=False)
    quota.change(0, 1, large=False)
    with pytest.raises(Overloaded):
        quota.change(0, 1, large=False)


def test_cancelled_work_is_swept_and_the_rest_keeps_its_order() -> None:
    threads, begin, done = TurnThreads(1, 1, "turns"), threading.Event(), list[int]()
    flow = Flow("one")
    held = threads.submit(begin.wait, 1.0)
    futures = [threads.submit(partial(done.append, cost), cost, flow=Flow("one")) for cost in range(200, 0, -1)]
    for future in futures[::2]:
        future.cancel()
    last = threads.submit(partial(done.append, 0), 1000, flow=flow)
    begin.set()
    assert held.result(PATIENCE)
    last.result(PATIENCE)
    assert done == [*range(1, 200, 2), 0]
    threads.shutdown()
