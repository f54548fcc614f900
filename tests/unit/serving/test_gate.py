"""The gate of dynamic batches: when a batch starts, who is in it, and what a request that leaves gives back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from handler.config.config import Config
from handler.core.errors import Overloaded
from handler.scheduler.batcher import MAX_OVERTAKES
from handler.serving.request.gate import BatchGate, Turn


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await story()

    asyncio.run(main())


def made(size: int = 2, delay: int = 60_000, room: int = 100, timeout: int = 60, lines: int = 16) -> BatchGate:
    config = Config(batch_size=size, max_batch_delay=delay, job_queue_size=room, predict_timeout=timeout)
    return BatchGate(config, max_lines=lines)


def timers_of_the_loop() -> list[asyncio.TimerHandle]:
    """Return the timers that are set in the running event loop from now on."""
    loop = asyncio.get_running_loop()
    timers = list[asyncio.TimerHandle]()
    call_later = loop.call_later

    def recorded(*arguments: Any, **options: Any) -> asyncio.TimerHandle:
        timers.append(call_later(*arguments, **options))
        return timers[-1]

    loop.call_later = recorded  # type: ignore[assignment, method-assign]
    return timers


def begun(turns: dict[Any, Turn]) -> set[Any]:
    """The names of those whose batch has started."""
    return {name for name, turn in turns.items() if turn.done()}


def test_a_full_batch_starts_at_once_and_the_next_when_all_have_left() -> None:
    async def story() -> None:
        gate = made()
        turns = {name: gate.join() for name in "abcde"}
        assert begun(turns) == {*"ab"}
        assert turns["a"].result() == turns["b"].result() == [turns["a"], turns["b"]]
        assert gate.num_waiting == 3
        gate.leave(turns["a"])
        assert begun(turns) == {*"ab"}
        gate.leave(turns["b"])
        assert begun(turns) == {*"abcd"}
        for name in "cd":
            gate.leave(turns[name])
        assert (begun(turns), gate.num_waiting) == ({*"abcd"}, 1), "it waits to be full"

    run(story)


def test_owners_take_turns_in_the_batches() -> None:
    async def story() -> None:
        gate = made()
        turns = {name: gate.join(name[0]) for name in ("a0", "a1", "a2", "a3", "a4", "a5", "b0", "c0", "b1")}
        order = [begun(turns)]
        gate.leave(turns["a3"])  # it gives up
        for _ in range(3):
            for name in order[-1]:
                gate.leave(turns[name])
            order.append({name for name in begun(turns) if not any(name in batch for batch in order)})
        assert order == [{"a0", "a1"}, {"a2", "b0"}, {"c0", "a4"}, {"b1", "a5"}]

    run(story)


def test_a_batch_that_does_not_fill_starts_after_its_delay() -> None:
    async def story() -> None:
        gate = made(delay=1)
        turn = gate.join()
        assert not turn.done()
        await gate.wait(turn)
        assert turn.result() == [turn]
        gate.leave(turn)
        later = gate.join()
        await gate.wait(later)
        assert later.result() == [later]

    run(story)


def test_the_delay_ends_when_nobody_waits() -> None:
    async def story() -> None:
        timers = timers_of_the_loop()
        gate = made()
        first = gate.join()
        gate.leave(first)
        assert [timer.cancelled() for timer in timers] == [True]
        second = gate.join()
        assert [timer.cancelled() for timer in timers] == [True, False], "the delay begins anew"
        third = gate.join()
        assert second.result() == [second, third]
        assert [timer.cancelled() for timer in timers] == [True, True]

    run(story)


def test_the_delay_goes_on_while_one_still_waits() -> None:
    async def story() -> None:
        timers = timers_of_the_loop()
        gate = made(size=3)
        first, _ = gate.join(), gate.join()
        gate.leave(first)
        assert [timer.cancelled() for timer in timers] == [False]

    run(story)


def test_a_full_gate_refuses_requests_and_takes_lines_beside_them() -> None:
    async def story() -> None:
        gate = made(size=9, room=2)
        gate.join(line=True)
        gate.check_room()
        gate.join()
        gate.join()
        for line in (False, True):
            with pytest.raises(Overloaded, match=r"^the queue is full \(job_queue_size=2\)$"):
                gate.join(line=line)
        assert gate.num_waiting == 2

    run(story)


def test_a_request_waits_as_long_as_it_may_and_a_line_for_any_time() -> None:
    async def story() -> None:
        gate = made(timeout=0)
        turn, line = gate.join(), gate.join(line=True)
        assert turn.result() == [turn, line]
        waiting, patient = gate.join(), gate.join(line=True)
        with pytest.raises(Overloaded, match=r"^the request waited 0 s for a batch \(option\.predict_timeout\)$"):
            await gate.wait(waiting)
        wait = asyncio.ensure_future(gate.wait(patient))
        await asyncio.sleep(0)
        assert not wait.done()
        for one in (waiting, turn, line):
            gate.leave(one)
        third = gate.join()
        assert third.result() == [third, patient]
        await wait

    run(story)


def test_a_line_that_leaves_is_in_no_batch() -> None:
    async def story() -> None:
        gate = made()
        line = gate.join(line=True)
        gate.leave(line)
        one, other = gate.join(), gate.join()
        assert one.result() == [one, other]
        assert not line.done()

    run(story)


def test_a_batch_has_no_more_lines_than_it_may() -> None:
    async def story() -> None:
        gate = made(size=4, lines=2)
        lines = [gate.join(line=True) for _ in range(5)]
        assert not any(line.done() for line in lines), "two lines do not fill it"
        requests = [gate.join(), gate.join()]
        assert requests[0].result() == [*requests, *lines[:2]]
        assert not lines[2].done()

    run(story)


def test_lines_come_last_but_not_after_more_than_ten_later_requests() -> None:
    async def story() -> None:
        gate = made(size=1)
        holder = gate.join()
        early = [gate.join() for _ in range(3)]
        line, second = gate.join(line=True), gate.join(line=True)
        late = [gate.join() for _ in range(2 * MAX_OVERTAKES)]
        order, current = list[Turn](), holder
        for _ in range(3 + 2 + 2 * MAX_OVERTAKES):
            gate.leave(current)
            waiting = [*early, line, second, *late]
            (current,) = [turn for turn in waiting if turn.done() and turn not in order]
            order.append(current)
        assert order[:3] == early
        assert order.index(line) == 3 + MAX_OVERTAKES
        assert order.index(second) == 3 + 1 + 2 * MAX_OVERTAKES

    run(story)


def test_a_batch_with_places_left_takes_no_more_lines_than_it_may() -> None:
    async def story() -> None:
        gate = made(size=9, delay=1, lines=2)
        request, *lines = gate.join(), *(gate.join(line=True) for _ in range(4))
        await gate.wait(request)
        assert request.result() == [request, *lines[:2]]

    run(story)
