"""How the executor's responses reach the results, as llmapi/utils.py and executor/proxy.py of 1.0 to 1.4 do it.

A thread of the proxy's puts all responses of a step into their queues, then wakes the readers by one notice to their
event loop. A loop that does not run at this moment gets none: the response stays in its queue, and nobody is told.
"""

from __future__ import annotations

import asyncio
import collections
import queue
import sys
import threading
from collections.abc import Sequence
from typing import Any

from tensorrt_llm._double.manners import MANNERS


class EventLoopShutdownError(Exception):
    """The readers' event loop does not run."""


class AsyncQueue:
    """Read in an event loop, written by another thread."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._items: collections.deque[Any] = collections.deque()
        self._event = asyncio.Event()

    def put_nowait(self, item: Any) -> None:
        """Tells nobody."""
        self._items.append(item)

    def notify(self) -> None:
        """To be called in the loop. What lies there may have been read already."""
        if self._items:
            self._event.set()

    async def get(self) -> Any:
        if MANNERS.release < (1, 2):
            await self._event.wait()  # also when something lies there without a notice
        while not self._items:
            await self._event.wait()
        found = self._items.popleft()
        if not self._items:
            self._event.clear()
        return found


def notify_many(loop: asyncio.AbstractEventLoop, queues: Sequence[AsyncQueue]) -> None:
    """
    Raises:
        EventLoopShutdownError: the loop does not run, and none of the queues was told.
    """
    if not loop.is_running():
        raise EventLoopShutdownError

    async def notify() -> None:
        for one in set(queues):
            one.notify()

    asyncio.run_coroutine_threadsafe(notify(), loop)


class Delivery:
    """
    Args:
        in_process: the executor runs in the LLM's process, so its own thread delivers and nothing catches its errors.
    """

    def __init__(self, *, in_process: bool) -> None:
        self.errors: queue.Queue[Exception] = queue.Queue()
        self.dropped = 0  # notices
        self._caught = not in_process and MANNERS.notices_are_caught
        self._steps: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._thread = None
        if not in_process:
            self._thread = threading.Thread(target=self._run, name="proxy_dispatch_result_thread", daemon=True)
            self._thread.start()

    def send(self, responses: list[tuple[Any, Any]]) -> None:
        """One step's, each with its result."""
        if self._thread is None:
            self._dispatch(responses)
        else:
            self._steps.put(responses)

    def close(self) -> None:
        self._steps.put(None)
        if self._thread not in (None, threading.current_thread()):
            self._thread.join()

    def _run(self) -> None:
        while (responses := self._steps.get()) is not None:
            self._dispatch(responses)

    def _dispatch(self, responses: list[tuple[Any, Any]]) -> None:
        waiting: list[AsyncQueue] = []
        for result, response in responses:
            result.queue.put_nowait(response)
            if isinstance(result.queue, AsyncQueue):
                waiting.append(result.queue)
        if not waiting:
            return
        try:
            notify_many(waiting[0].loop, waiting)  # the loop of all, as upstream has it
        except EventLoopShutdownError as error:
            self.dropped += 1
            if self._caught:
                print(
                    "[TRT-LLM] [W] proxy.py: EventLoopShutdownError because event loop is not running", file=sys.stderr
                )
            else:
                self.errors.put(error)
        except Exception as error:  # whatever a thread of the executor's meets
            self.errors.put(error)
