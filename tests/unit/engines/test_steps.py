"""The steps in which an engine's event loop delivers output."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import pytest

from handler.core.values import Finish
from handler.engines.base import Step
from handler.engines.remote.servers import Part
from handler.engines.remote.steps import StepLoop

NEVER = 1000.0  # seconds
TOKEN, END = [65], Part([66], [None], finish=Finish.LENGTH)
EMPTY: Step = Step.of([])


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def steps(
    loop: asyncio.AbstractEventLoop, interval: float = NEVER, look: Callable[[], object] = lambda: None
) -> StepLoop:
    return StepLoop(loop, interval, look)


def tokens(step: Step) -> list[tuple[int, list[int]]]:
    return [*((key, [id]) for key, id in zip(step.keys, step.ids, strict=True)),
            *((output.key, [*output.ids]) for output in step.others)]  # fmt: skip


def delivered(found: StepLoop) -> list[tuple[int, list[int]]]:
    """The tokens of the next step."""
    result: list[Step] = []
    assert found.run(result.append)
    (step,) = result
    return tokens(step)


def test_what_comes_in_one_iteration_is_one_step(loop: asyncio.AbstractEventLoop) -> None:
    found, result = steps(loop), list[Step]()

    def come(*, more: bool) -> None:
        found.add_token(1, 65)
        found.add(2, Part([66, 67], [None, None]))
        found.add_token(3, 68)
        if more:
            loop.call_later(0.001, lambda: come(more=False))

    def deliver(step: Step) -> bool:
        result.append(step)
        return len(result) < 2

    loop.call_soon(lambda: come(more=True))
    assert found.run(deliver)
    assert [tokens(step) for step in result] == [[(1, [65]), (3, [68]), (2, [66, 67])]] * 2
    assert found.is_empty


def test_what_comes_without_a_run_is_the_first_step_of_the_next(loop: asyncio.AbstractEventLoop) -> None:
    found = steps(loop)
    found.add_token(1, 65)
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert not found.is_empty
    assert delivered(found) == [(1, [65])]


def test_a_token_after_a_part_of_its_request_joins_it(loop: asyncio.AbstractEventLoop) -> None:
    found = steps(loop)
    found.add(1, Part([65, 66], [-0.5, -0.25]))
    found.add_token(1, 67)
    result: list[Step] = []
    found.run(result.append)
    ((output,),) = [step.others for step in result]
    assert (output.ids, output.logprobs) == ([65, 66, 67], [-0.5, -0.25, None])


def test_a_part_after_a_token_of_its_request_comes_after_it(loop: asyncio.AbstractEventLoop) -> None:
    found = steps(loop)
    found.add_token(1, 65)
    found.add(1, END)
    assert delivered(found) == [(1, [65]), (1, [66])]


def test_a_dropped_requests_output_is_not_delivered(loop: asyncio.AbstractEventLoop) -> None:
    found = steps(loop)
    for key in (1, 2, 1, 3):
        found.add_token(key, 65)
    found.add(4, END)
    for key in (1, 4, 5):
        found.drop(key)
    assert delivered(found) == [(2, [65]), (3, [65])]


def test_a_stop_comes_before_the_next_step(loop: asyncio.AbstractEventLoop) -> None:
    found, result = steps(loop), list[Step]()

    def come() -> None:
        found.add_token(1, 65)
        found.stop()
        found.add_token(2, 66)

    loop.call_soon(come)
    assert not found.run(result.append)
    assert result == []
    assert delivered(found) == [(1, [65]), (2, [66])]


def test_a_run_that_has_ended_delivers_nothing_more(loop: asyncio.AbstractEventLoop) -> None:
    found, result = steps(loop), list[Step]()

    def deliver(step: Step) -> bool:
        result.append(step)
        found.add_token(2, 66)
        return False

    found.add_token(1, 65)
    assert found.run(deliver)
    assert [tokens(step) for step in result] == [[(1, [65])]]
    assert delivered(found) == [(2, [66])]


def test_an_exception_of_the_receiver_ends_the_run(loop: asyncio.AbstractEventLoop) -> None:
    found = steps(loop)

    def deliver(step: Step) -> bool:
        raise ConnectionError(tokens(step))

    found.add_token(1, 65)
    with pytest.raises(ConnectionError, match="65"):
        found.run(deliver)
    found.add_token(1, 66)
    assert delivered(found) == [(1, [66])]


def test_an_interval_without_a_step_ends_with_an_empty_one(loop: asyncio.AbstractEventLoop) -> None:
    looks: list[int] = []
    found, result = steps(loop, 0.01, lambda: looks.append(1)), list[Step]()

    def deliver(step: Step) -> bool:
        result.append(step)
        return len(result) < 3

    assert found.run(deliver)
    assert (result, len(looks)) == ([EMPTY] * 3, 3)


def test_steps_take_the_place_of_empty_ones(loop: asyncio.AbstractEventLoop) -> None:
    found, result = steps(loop, 0.2), list[Step]()

    def come(rest: int) -> None:
        found.add_token(1, rest)
        if rest:
            loop.call_soon(come, rest - 1)
        else:
            loop.call_later(0.3, found.stop)

    def deliver(step: Step) -> bool:
        result.append(step)
        return True

    loop.call_soon(come, 20)
    found.run(deliver)
    assert sum(step.ids != [] for step in result) >= 20
    assert result.count(EMPTY) <= 1


def test_runs_that_are_stopped_again_and_again_do_not_put_an_interval_off(loop: asyncio.AbstractEventLoop) -> None:
    looks: list[int] = []
    found, result = steps(loop, 0.05, lambda: looks.append(1)), list[Step]()

    def deliver(step: Step) -> bool:
        result.append(step)
        return True

    for _ in range(1000):
        loop.call_later(0.001, found.stop)
        found.run(deliver)
        if result:
            break
    assert result == [EMPTY]
    assert looks


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time passes only while it waits."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__()

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


@pytest.mark.parametrize("tokens_at", [(), (0.001, 0.1, 0.999, 1.001), (0.5, 1.2), (0.999, 1.0, 1.5, 2.499)])
def test_no_two_steps_are_further_apart_than_the_interval(
    monkeypatch: pytest.MonkeyPatch, tokens_at: Sequence[float]
) -> None:
    loop = VirtualLoop()
    monkeypatch.setattr(time, "monotonic", loop.time)
    found, times, looks = steps(loop, 100.0, lambda: looks.append(loop.now)), [0.0], [0.0]
    found.interval = 1.0
    for at in tokens_at:
        loop.call_later(at, found.add_token, 1, 65)
    loop.call_later(10.0, found.stop)

    def deliver(step: Step) -> bool:
        times.append(loop.now)
        return True

    found.run(deliver)
    found.close()
    loop.close()
    for seen in (times, looks):
        assert max(later - earlier for earlier, later in pairwise(seen)) <= 1.0 + 1e-9
    assert len(times) <= 1 + len(tokens_at) + 11


def test_nothing_is_due_after_the_end(loop: asyncio.AbstractEventLoop) -> None:
    looks: list[int] = []
    found = steps(loop, 0.0, lambda: looks.append(1))
    found.close()
    loop.call_later(0.01, loop.stop)
    loop.run_forever()
    assert looks == []
