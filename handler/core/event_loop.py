"""Run coroutines on uvloop and up to their first wait, and blocking calls in daemon threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:  # not on this platform
        return asyncio.run(coroutine)
    return uvloop.run(coroutine)


def start_now(coroutine: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """Run a coroutine up to its first wait, then as a task. Without a wait, it costs no turn of the running loop.

    Raises:
        what the coroutine raises before it waits.
    """
    loop = asyncio.get_running_loop()
    try:
        waiting = coroutine.send(None)
    except StopIteration as done:
        future: asyncio.Future[T] = loop.create_future()
        future.set_result(done.value)
        return future
    return loop.create_task(Begun(coroutine, waiting))


class Begun(Coroutine[Any, Any, T]):
    """A coroutine that has run up to its first wait; `waiting` is what it waits for."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], waiting: Any) -> None:
        self._coroutine = coroutine
        self._first = [waiting]

    def send(self, value: Any) -> Any:
        return self._first.pop() if self._first else self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        self._first.clear()
        try:
            return self._coroutine.throw(*error)
        finally:
            del error  # its traceback names this frame: a cycle, which would keep all that the coroutine has

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, T]:
        raise NotImplementedError("only a task runs it")


async def run_in_daemon_thread(call: Callable[[], T]) -> T:
    """Return the call's result, or raise what it raises. The call goes on when its awaiter is cancelled.

    The loop's executor would not do: its threads are joined when the process ends.
    """
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # from now on it cannot be cancelled

    def work() -> None:
        try:
            result = call()
        except Exception as error:  # whatever the call raises belongs to its awaiter
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, name="blocking-call", daemon=True).start()
    return await asyncio.wrap_future(future)
