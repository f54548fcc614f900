"""What may wait for ever, run beside the event loop: it holds up neither the loop nor the process's end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def aside(call: Callable[[], T]) -> T:
    """The call's result, or what it raises; it goes on when whoever waits for it is cancelled.

    On a daemon thread of its own: the loop's executor would have its threads joined when the process ends, and a file
    system that has gone away lets nobody who reads from it go.
    """
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # from now on it cannot be cancelled

    def run() -> None:
        try:
            result = call()
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=run, name="aside", daemon=True).start()
    return await asyncio.wrap_future(done)
