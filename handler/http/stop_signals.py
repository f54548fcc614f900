"""Note SIGTERM and SIGINT in a handler that writes nothing; the event loop does the rest.

It stands alone, because a start installs it before it imports what takes long.

Python runs a signal's handler between any two steps of the main thread, also in the middle of a log write. A handler
that logs there raises `RuntimeError: reentrant call` in whatever was interrupted.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
from collections.abc import Callable
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """The signals received so far. All methods belong to the main thread.

    Before `listen` the first signal raises: SystemExit(0) for SIGTERM, KeyboardInterrupt for SIGINT. From then on no
    signal raises anything. After `leave` the first signal changes nothing. Without a listener a second one ends the
    process at once, as does one during an import: of an exception, orjson's crashes and numpy's makes an ImportError.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._num_told = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: Callable[[signal.Signals], object] | None = None
        self._leaving = False

    def install(self) -> None:
        """Handle the signals, also those that came while the process that started this one had them blocked."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        atexit.register(_ignore)  # Python restores the default handlers before it ends, and SIGTERM would kill it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def listen(self, listener: Callable[[signal.Signals], object]) -> None:
        """Have the running event loop call `listener` once for each signal, earlier ones that nobody heard included."""
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._tell()

    def leave(self) -> None:
        """The loop is about to close, and the process to end."""
        self._leaving = True
        self._loop = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._tell)
        elif len(self.received) > 1 or (not self._leaving and _imports(frame)):
            os._exit(0 if signal.SIGTERM in self.received else 130)
        elif not self._leaving:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(0)

    def _tell(self) -> None:
        while self._num_told < len(self.received):
            self._num_told += 1
            assert self._listener is not None, "there is one as soon as there is a loop"
            self._listener(signal.Signals(self.received[self._num_told - 1]))


def _imports(frame: FrameType | None) -> bool:
    """Return true if `frame` or one of its callers is of an import."""
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


def _ignore() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
