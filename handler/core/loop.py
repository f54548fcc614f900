"""The event loop of a process: how it runs, how signals stop it, what ends it when it is blocked, and when garbage is
collected.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import ctypes
import faulthandler
import functools
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec, TypeVar

log = logging.getLogger("handler.server")

T = TypeVar("T")
P = ParamSpec("P")


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


def settle(future: concurrent.futures.Future[T], call: Callable[[], T]) -> None:
    """Set a future to the call's result or exception."""
    try:
        result = call()
    except BaseException as error:  # as ThreadPoolExecutor does
        future.set_exception(error)
    else:
        future.set_result(result)


async def run_in_daemon_thread(call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Return the call's result, or raise what it raises. The call continues when its awaiter is cancelled.

    The loop's executor cannot be used: its threads are joined when the process ends.
    """
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # from now on it cannot be cancelled
    run = functools.partial(call, *arguments, **named)
    threading.Thread(target=settle, args=(future, run), name="blocking-call", daemon=True).start()
    return await asyncio.wrap_future(future)


# -- signals that stop a server: the handler notes them and writes nothing, the event loop does the rest ---------------
# Python runs a signal's handler between any two steps of the main thread, also in the middle of a log write. A handler
# that logs there raises `RuntimeError: reentrant call` in whatever was interrupted.

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
        """Have the running event loop call `listener` once for each signal, including earlier ones without a
        listener.
        """
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._tell()

    def leave(self) -> None:
        """Prepare for the end: the loop is about to close, and the process to exit."""
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
    """Return true if `frame` or one of its callers belongs to an import."""
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


def _ignore() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


# -- end a process whose event loop stands still, so that whatever started it can start it again -----------------------
# A process of its own watches (`loop_watcher.py`): the loop may stand still in C code that lets no Python thread run.
# It sends the loop a byte each second, which the loop reads. Python's C signal handler writes the numbers of signals
# to the same socket, so that the watcher also learns of a SIGTERM that the loop does not hear.

_WATCHER = Path(__file__).with_name("loop_watcher.py")
_DUMP = getattr(signal, "SIGRTMAX", 0)  # at this signal the process writes its threads' stacks
_OPTION = "option.event_loop_timeout"


class LoopWatch:
    """Ends the process if its event loop is blocked between `start` and `stop`. Linux only.

    Time does not count while the process is stopped or under a debugger, or while the whole machine is paused.

    Args:
        seconds: how long the loop may be blocked; 0 disables the watch.
        signals: whether the loop handles SIGTERM and SIGINT. One left unhandled for 8 s also ends the process.
    """

    def __init__(self, seconds: float, *, signals: bool) -> None:
        self._seconds = seconds
        self._signals = signals
        self._watcher: subprocess.Popen[bytes] | None = None
        self._opened = contextlib.ExitStack()

    def start(self) -> None:
        """Start watching the running loop; do nothing outside the main thread, where the process may not be ours."""
        is_main = threading.current_thread() is threading.main_thread()
        if not self._seconds or sys.platform != "linux" or not is_main or self._watcher is not None:
            return
        with contextlib.ExitStack() as opened:
            loop = asyncio.get_running_loop()
            sending, receiving = map(opened.enter_context, socket.socketpair())
            sending.setblocking(False)
            receiving.setblocking(False)
            stacks = opened.enter_context(open(os.memfd_create("stacks"), "wb", buffering=0))
            faulthandler.register(_DUMP, file=stacks, all_threads=True)
            loop.add_reader(receiving.fileno(), _read, receiving)
            opened.callback(loop.remove_reader, receiving.fileno())
            if self._signals:
                # In the place of the loop's own: the byte wakes the loop all the same.
                before = signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)
                opened.callback(signal.set_wakeup_fd, before, warn_on_full_buffer=False)
            fds = (sending.fileno(), receiving.fileno(), stacks.fileno())
            numbers = map(str, (os.getpid(), *fds, _DUMP, self._seconds))
            command = [sys.executable, "-S", "-I", str(_WATCHER), *numbers]
            try:
                self._watcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)
            except OSError as error:
                log.warning("%s: the event loop is not watched: %s", _OPTION, error)
                return
            self._opened = opened.pop_all()

    def stop(self) -> None:
        """End the watch; the loop still runs."""
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher.wait()
            self._watcher = None
        self._opened.close()


def _read(receiving: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        receiving.recv(4096)


# -- schedule of Python's garbage collection: by the clock and by new objects, without those of the start --------------
# A collection holds the GIL for about 0.3 microseconds an object. After `gc.freeze` it visits only the objects of
# requests, not the hundreds of thousands of modules, vocabulary and libraries.

YOUNG_SECONDS = 2.0
"""Seconds between collections of the young generations."""

FULL_SECONDS = 20.0
"""Seconds between collections of all generations."""

CROWD = 80_000
"""Objects in use (some 570 streams) above which a full collection waits, as it would pause too long."""

CROWD_SECONDS = 600.0
"""Maximum seconds that a full collection waits."""

_YOUNG = 50_000  # new objects that start a young collection at once: those of some 300 new streams
_MIDDLE = 1  # two such collections lie between two that take the middle generation along
_NEVER = 1 << 30
_THREAD = "garbage"
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD
_LARGE = 1 << 20  # bytes


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection during imports, then freeze the modules, which the interpreter's exit would also
    visit.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def keep_collecting() -> None:
    """Freeze all objects. Collect new ones by the clock, on a thread; many of them at once, where they are made."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _NEVER)
    if all(thread.name != _THREAD for thread in threading.enumerate()):  # another model has started it
        threading.Thread(target=_collect, name=_THREAD, daemon=True).start()


def return_large_blocks() -> None:
    """Have the C library return a large block to the system when it is freed.

    By itself it keeps blocks of up to 32 MiB, for each thread, from the first one that is freed on (mallopt(3)).
    """
    with contextlib.suppress(AttributeError):  # it is not GNU's
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)


def _collect() -> None:
    counted = collected = time.monotonic()
    while True:
        time.sleep(YOUNG_SECONDS)
        gc.collect(1)
        now = time.monotonic()
        if now - counted < FULL_SECONDS:
            continue
        counted = now  # which pauses too
        if now - collected < CROWD_SECONDS and len(gc.get_objects(generation=2)) > CROWD:
            continue
        gc.collect()
        _trim()
        collected = now


def _trim() -> None:
    """Return freed memory of the C library to the system; after a large request that may be much."""
    with contextlib.suppress(AttributeError):  # it is not GNU's
        ctypes.CDLL(None).malloc_trim(0)  # without the GIL
