"""Coroutines that begin at once, and programs that run beside them."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from handler.core.loop import open_in_daemon_thread, start_now, wait_for
from tests.doubles import terminal

# -- a coroutine that begins at once: no task where it does not wait, and an ordinary one where it does ----------------


async def _double(future: asyncio.Future[int]) -> int:
    return 2 * await future


def test_what_does_not_wait_needs_no_task() -> None:
    async def story() -> None:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        future.set_result(3)
        begun = start_now(_double(future))
        assert begun.done()
        assert not isinstance(begun, asyncio.Task)
        assert begun.result() == 6

    asyncio.run(story())


def test_what_waits_goes_on_with_what_it_waited_for() -> None:
    async def story() -> None:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        begun = start_now(_double(future))
        assert not begun.done()
        future.set_result(4)
        assert await begun == 8

    asyncio.run(story())


def test_an_error_reaches_the_coroutine() -> None:
    caught: list[BaseException] = []

    async def careful(future: asyncio.Future[int]) -> str:
        try:
            await future
        except (ValueError, asyncio.CancelledError) as error:
            caught.append(error)
            await asyncio.sleep(0.001)  # not for what it waited for before
        return "went on"

    async def story() -> None:
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[int]] = [loop.create_future() for _ in range(3)]
        failed, cancelled, early = map(start_now, map(careful, futures))
        early.cancel()  # before the task has run at all
        await asyncio.sleep(0)
        futures[0].set_exception(ValueError("no"))
        cancelled.cancel()
        assert await failed == await cancelled == await early == "went on"

    asyncio.run(story())
    assert [type(error) for error in caught] == [asyncio.CancelledError, ValueError, asyncio.CancelledError]


def test_a_cancelled_coroutine_frees_what_it_has_at_once() -> None:
    """A request that its client has dropped may have a large body."""

    class Body:
        pass

    async def read(body: Body, future: asyncio.Future[int]) -> None:
        await future

    async def story() -> None:
        body = Body()
        kept = weakref.ref(body)
        begun = start_now(read(body, asyncio.get_running_loop().create_future()))
        del body
        await asyncio.sleep(0)
        begun.cancel()
        del begun
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert kept() is None

    gc.disable()
    try:
        asyncio.run(story())
    finally:
        gc.enable()


def test_an_error_before_the_first_wait_is_raised_at_once() -> None:
    async def fail() -> None:
        raise ValueError("no")

    async def story() -> None:
        with pytest.raises(ValueError, match="no"):
            start_now(fail())

    asyncio.run(story())


# -- a wait with a limit: a cancellation ends the waiting task, however close it is to the result ----------------------


@pytest.mark.parametrize("iterations", range(6))
def test_a_cancellation_beside_the_result_is_not_ignored(iterations: int) -> None:
    async def story() -> None:
        arrived = asyncio.Event()

        async def wait() -> None:
            await wait_for(arrived.wait(), 60)
            await wait_for(asyncio.Event().wait(), 60)

        waiting = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        arrived.set()
        for _ in range(iterations):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting}, timeout=30)
        assert waiting.cancelled()

    asyncio.run(story())


def test_what_is_late_is_cancelled_and_has_ended() -> None:
    async def story() -> None:
        ended: list[str] = []

        async def late() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                ended.append("late")

        with pytest.raises(asyncio.TimeoutError):
            await wait_for(late(), 0.001)
        assert ended == ["late"]

    asyncio.run(story())


def test_the_result_or_error_of_what_ends_in_spite_of_its_limit_is_passed_on() -> None:
    async def stubborn(error: Exception | None) -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if error is not None:
                raise error from None
        return 3

    async def story() -> None:
        assert await wait_for(stubborn(None), 0.001) == 3
        with pytest.raises(ValueError, match="a bug"):
            await wait_for(stubborn(ValueError("a bug")), 0.001)

    asyncio.run(story())


# -- something that is opened on a thread ------------------------------------------------------------------------------


class _Opened:
    """A resource whose opening takes until `go` is set."""

    def __init__(self, go: threading.Event, error: Exception | None = None) -> None:
        self.closed = threading.Event()
        go.wait(10)
        if error is not None:
            raise error

    def close(self) -> None:
        self.closed.set()


def test_what_a_thread_opens_is_closed_if_nobody_waits_any_more() -> None:
    opened: list[_Opened] = []

    def open_one(go: threading.Event) -> _Opened:
        opened.append(_Opened(go))
        return opened[0]

    async def story() -> None:
        go = threading.Event()
        task = asyncio.ensure_future(open_in_daemon_thread(open_one, go))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert opened == []
        go.set()

    asyncio.run(story())
    for _ in range(1000):
        if opened:
            break
        threading.Event().wait(0.01)
    assert opened[0].closed.wait(10)


def test_what_a_thread_opens_is_returned_open_or_its_error_raised() -> None:
    go = threading.Event()
    go.set()
    assert not asyncio.run(open_in_daemon_thread(_Opened, go)).closed.is_set()
    with pytest.raises(ValueError, match="a bug"):
        asyncio.run(open_in_daemon_thread(_Opened, go, ValueError("a bug")))


# -- what is shown while a helper program runs -------------------------------------------------------------------------


_CODE = """
import sys
from handler.core import child_processes
child = "import sys; from handler.core.child_processes import tell; tell(0.07); tell(0.4); sys.exit('9 % full')"
done = child_processes.run([sys.executable, "-c", child], doing="converting [a] model " + "x" * 80)
assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"9 % full\\n")
"""


def test_a_terminal_shows_what_is_done_and_clears_it() -> None:
    shown = terminal.shown(_CODE)
    assert "0:00:0" in shown
    assert " 40 % converting [a] model x" in shown
    assert shown.rstrip("\r\n").endswith("\x1b[2K")


def test_a_pipe_gets_nothing_of_a_short_program() -> None:
    assert terminal.piped(_CODE) == ""


def test_a_pipe_gets_lines_while_a_program_takes_long() -> None:
    lines = terminal.piped(_CODE.replace("child =", "child_processes.SECONDS = 0\nchild =")).splitlines()
    assert lines == [f"converting [a] model {'x' * 80}: {percent} %" for percent in (7, 40)]
