"""Run a blocking call in a daemon thread, so that a hung file system blocks neither the event loop nor shutdown."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def run_in_daemon_thread(call: Callable[[], T]) -> T:
    """Return the call's result, or raise what it raises. The call goes on when its awaiter is cancelled.

    The loop's executor would not do: its threads are joined when the process ends.
    """
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # from now on it cannot be cancelled

    def run() -> None:
        try:
            result = call()
        except Exception as error:  # whatever the call raises belongs to its awaiter
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="blocking-call", daemon=True).start()
    return await asyncio.wrap_future(future)
