"""Run coroutines on uvloop, and blocking calls in daemon threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:  # not on this platform
        return asyncio.run(coroutine)
    return uvloop.run(coroutine)


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
