"""The worker's own event loop, which runs within DJL's calls and at intervals between them."""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from handler.serving.engine_driver import EngineDriver

T = TypeVar("T")

_PERIOD = 0.1  # maximum seconds between runs of the loop while the engine is stepped


class WorkerLoop:
    """An event loop that runs only within the methods of this class.

    Callers must hold `lock`, because `look_after` runs the loop on another thread. The loop is asyncio's own, because
    uvloop takes three times as long to start and stop.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._run_at = 0.0  # when the loop last ran
        self._until = 0.0  # when the current wait ends, by the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._closed = threading.Event()
        self.lock = threading.Lock()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the loop until the coroutine ends, and return the coroutine's result or raise its exception."""
        task = self._loop.create_task(coroutine)
        task.add_done_callback(self.stop)
        while not task.done():
            self._run()
        return task.result()

    def poll(self) -> None:
        """Run the callbacks that are due, without waiting."""
        self._loop.stop()  # takes effect after one pass
        self._run()

    def wait(self, seconds: float) -> None:
        """Run the loop until `stop` is called, for at most `seconds`."""
        self._until = self._loop.time() + seconds
        if self._timer is None or self._timer.when() > self._until:
            self._set_timer()
        self._run()

    def wait_until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Run the loop until `done` returns true, for at most `seconds`. `done` is called whenever the loop stops.

        Returns:
            Whether `done` returned true in time.
        """
        deadline = time.monotonic() + seconds
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.wait(left)
        return True

    def step(self, driver: EngineDriver, seconds: float) -> None:
        """Wait for the engine for at most `seconds`, and deliver its output, usually without running the loop.

        Starting and stopping asyncio's loop costs as much as the tokens of 20 requests. Timers and callbacks may be up
        to 100 ms late.
        """
        if driver.fd is None or time.monotonic() > self._run_at + _PERIOD:
            return self.wait(seconds)
        if [key.fd for key, _ in self._selector.select(seconds)] == [driver.fd]:
            driver.step()
        else:
            self.poll()

    def stop(self, cause: object = None) -> None:
        """Stop the loop after the current pass. `cause` is ignored, so that this method can be a callback."""
        self._loop.stop()

    def close(self) -> None:
        """Close the loop, and end `look_after`."""
        self._closed.set()
        self._loop.close()

    def _run(self) -> None:
        self._loop.run_forever()
        self._run_at = time.monotonic()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._until, self._look_at_clock)

    def _look_at_clock(self) -> None:
        """Stop the loop if the current wait is over. Otherwise, set the timer again.

        All waits share one timer, because most waits end early and a timer for each of them would cost more.
        """
        self._timer = None
        if self._loop.time() >= self._until:
            self._loop.stop()
        else:
            self._set_timer()

    def look_after(self, period: float) -> None:
        """Poll the loop every `period` seconds until it is closed. This is for another thread than that of the calls.

        This way, an engine that dies between DJL's calls is restarted before the next request arrives.
        """
        while not self._closed.wait(period):
            with self.lock:
                if not self._closed.is_set():
                    self.poll()
