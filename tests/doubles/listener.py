"""A listener on loopback, whose event loop runs on a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any


@contextlib.contextmanager
def on_thread(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], **options: Any
) -> Iterator[int]:
    """Call `answer` with each connection. Yield the port, and at the end cancel what still runs.

    Args:
        options: those of `asyncio.start_server`.
    """
    loop = asyncio.new_event_loop()
    listener = loop.run_until_complete(asyncio.start_server(answer, "127.0.0.1", 0, **options))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        for listening in listener.sockets:
            loop.remove_reader(listening.fileno())
        for _ in range(3):  # connections that it has just accepted begin: nobody would close them before that
            loop.run_until_complete(asyncio.sleep(0))
        listener.close()
        while tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks))
        for _ in range(3):  # connections close
            loop.run_until_complete(asyncio.sleep(0))
        loop.close()
