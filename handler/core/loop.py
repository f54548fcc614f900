"""Runs the event loop of a process, stops it on signals, ends the process if the loop is blocked, and schedules garbage
collection.
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
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec, Protocol, TypeVar

from handler.core.child_processes import Child

log = logging.getLogger("handler.server")

T = TypeVar("T")
P = ParamSpec("P")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to completion on uvloop."""
    import uvloop

    return uvloop.run(coroutine)


def start_now(coroutine: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """Run a coroutine until it first waits, then continue it as a task.

    A coroutine that never waits needs no iteration of the event loop. This function raises any exception that occurs
    before the first wait.
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
    """A coroutine that has run up to its first wait. `waiting` is the object that it waits for."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], waiting: Any) -> None:
        self._coroutine = coroutine
        self._first = [waiting]

    def send(self, value: Any) -> Any:
        return self._first.pop() if self._first else self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        if self._first and (waiting := self._first.pop()) is not None:
            waiting.cancel()  # a task that has not run yet cannot do it
        try:
            return self._coroutine.throw(*error)
        finally:
            del error  # its traceback refers to this frame, a cycle that would keep the coroutine's objects alive

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, T]:
        raise NotImplementedError("this coroutine must be run by a task")


async def wait_for(awaitable: Awaitable[T], seconds: float) -> T:
    """Wait for a result as `asyncio.wait_for` does since Python 3.12, and cancel the awaitable after `seconds`.

    Before, `asyncio.wait_for` ignored a cancellation that arrived together with the result (python/cpython#81839). A
    task that only a cancellation ends would then run forever.

    Raises:
        asyncio.TimeoutError: there was no result in time.
    """
    future = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({future}, timeout=seconds)
    except asyncio.CancelledError:
        await _cancel(future)
        raise
    if future.done():
        return future.result()
    await _cancel(future)
    if future.cancelled():
        raise asyncio.TimeoutError
    return future.result()  # it ended in spite of the cancellation


async def _cancel(future: asyncio.Future[Any]) -> None:
    """Cancel a future, and wait until it has ended."""
    future.cancel()
    await asyncio.wait({future})
    if not future.cancelled():
        future.exception()  # otherwise the event loop would log that nobody retrieved it


def has_unread(transport: asyncio.BaseTransport) -> bool:
    """Return whether bytes, or the end of the stream, have arrived that the event loop has not read yet."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))


def settle(future: concurrent.futures.Future[T], call: Callable[[], T]) -> None:
    """Set a future to the result or exception of a call."""
    try:
        result = call()
    except BaseException as error:  # as ThreadPoolExecutor does
        future.set_exception(error)
    else:
        future.set_result(result)


async def run_in_daemon_thread(call: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    """Run a call on a daemon thread and return its result. The call continues if the task that awaits it is cancelled.

    The executor of the event loop cannot be used because its threads are joined when the process ends.
    """
    return await asyncio.wrap_future(_on_daemon_thread(functools.partial(call, *arguments, **keywords)))


class Closeable(Protocol):
    """Something that holds a resource until it is closed."""

    def close(self) -> None:
        """Release the resource."""


CloseableT = TypeVar("CloseableT", bound=Closeable)


async def open_in_daemon_thread(call: Callable[P, CloseableT], *arguments: P.args, **keywords: P.kwargs) -> CloseableT:
    """Run a call on a daemon thread as `run_in_daemon_thread` does, and close its result if nobody receives it.

    If the task that awaits it is cancelled, the result is closed as soon as the call returns.
    """
    future = _on_daemon_thread(functools.partial(call, *arguments, **keywords))
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        future.add_done_callback(_close)
        raise


def _on_daemon_thread(call: Callable[[], T]) -> concurrent.futures.Future[T]:
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # from now on the future cannot be cancelled
    threading.Thread(target=settle, args=(future, call), name="blocking-call", daemon=True).start()
    return future


def _close(future: concurrent.futures.Future[Any]) -> None:
    if future.exception() is None:
        future.result().close()


# -- signals that stop a server: the handler records them and writes nothing, and the event loop does the rest ---------
# Python runs a signal's handler between any two steps of the main thread, even while a log record is being written.
# If the handler logs then, `RuntimeError: reentrant call` is raised in the interrupted code.

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Receives the signals that stop a server. All methods must be called on the main thread.

    Before `listen`, the first signal raises SystemExit(0) for SIGTERM or KeyboardInterrupt for SIGINT. After `listen`,
    no signal raises an exception. After `leave`, the first signal is ignored. While there is no listener, a second
    signal ends the process immediately. Before `listen`, a signal during an import also ends the process immediately,
    because an exception would crash orjson and be turned into an ImportError by numpy.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._num_delivered = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: Callable[[signal.Signals], object] | None = None
        self._leaving = False

    def install(self) -> None:
        """Install the signal handlers, and unblock the signals. Pending signals are then delivered."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        atexit.register(_ignore)  # Python restores the default handlers before it ends, and SIGTERM would kill it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def listen(self, listener: Callable[[signal.Signals], object]) -> None:
        """Let the running event loop call `listener` for each signal, including signals that have already arrived."""
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._tell()

    def leave(self) -> None:
        """Prepare for the end of the process. The event loop is about to close."""
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
        while self._num_delivered < len(self.received):
            self._num_delivered += 1
            assert self._listener is not None, "a listener is set together with the loop"
            self._listener(signal.Signals(self.received[self._num_delivered - 1]))


def _imports(frame: FrameType | None) -> bool:
    """Return whether `frame` or one of its callers belongs to an import."""
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


def _ignore() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


# -- end of a process whose event loop is blocked, so that its parent can start it again -------------------------------
# A separate process watches the loop (`loop_watcher.py`), because C code that blocks the loop may also block all
# Python threads. It sends the loop a byte each second, which the loop reads. Python's C signal handler writes the
# numbers of signals to the same socket, so the watcher also notices a SIGTERM that the loop does not handle.

_WATCHER = Path(__file__).with_name("loop_watcher.py")
_DUMP = int(getattr(signal, "SIGRTMAX", 0))  # at this signal the process writes its threads' stacks
_OPTION = "option.event_loop_timeout"


class LoopWatch:
    """Ends the process if its event loop is blocked between `start` and `stop`. Linux only.

    Time during which the process is stopped or under a debugger, or the whole machine is paused, does not count.

    Args:
        seconds: how long the loop may be blocked; 0 disables the watch.
        signals: whether the loop handles SIGTERM and SIGINT. If so, the process also ends when a signal is not handled
            within 8 s.
    """

    def __init__(self, seconds: float, *, signals: bool) -> None:
        self._seconds = seconds
        self._signals = signals
        self._watcher: Child | None = None
        self._opened = contextlib.ExitStack()

    def start(self) -> None:
        """Start watching the running loop. Outside of the main thread, do nothing: the process may belong to a host."""
        if not self._seconds or sys.platform != "linux" or self._watcher is not None:
            return
        if threading.current_thread() is not threading.main_thread():
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
                # This replaces the loop's own descriptor. A byte on it wakes the loop too.
                before = signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)
                opened.callback(signal.set_wakeup_fd, before, warn_on_full_buffer=False)
            fds = (sending.fileno(), receiving.fileno(), stacks.fileno())
            command = [sys.executable, "-S", "-I", *map(str, (_WATCHER, os.getpid(), *fds, _DUMP, self._seconds))]
            try:
                self._watcher = Child(command, pass_fds=fds)
            except OSError as error:
                log.warning("%s: the event loop is not watched: %s", _OPTION, error)
                return
            self._opened = opened.pop_all()

    def stop(self) -> None:
        """Stop watching. The loop must still be running."""
        if self._watcher is not None:
            self._watcher.end()
            self._watcher = None
        self._opened.close()


def _read(receiving: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        receiving.recv(4096)


# -- schedule of Python's garbage collection, by time and by number of new objects -------------------------------------
# A collection holds the GIL for about 0.3 microseconds per object. After `gc.freeze` it visits only the objects of
# requests, not the hundreds of thousands of objects of modules, the vocabulary and libraries.

YOUNG_SECONDS = 2.0
"""Number of seconds between collections of the young generations."""

FULL_SECONDS = 20.0
"""Number of seconds between collections of all generations."""

CROWD = 80_000
"""Number of live objects (about 570 streams) above which a full collection takes too long and is postponed."""

CROWD_SECONDS = 600.0
"""Maximum number of seconds between two full collections, regardless of the number of live objects."""

_YOUNG = 50_000  # number of new objects, as about 300 new streams create, that starts a young collection at once
_MIDDLE = 1  # every third young collection includes the middle generation
_NEVER = 1 << 30
_THREAD = "garbage"
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD
_LARGE = 1 << 20  # bytes


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection during imports, then freeze the modules, so that the collection at exit skips them."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def keep_collecting() -> None:
    """Freeze all objects. Then collect garbage on a thread, periodically and whenever many objects are created."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _NEVER)
    if all(thread.name != _THREAD for thread in threading.enumerate()):  # else another model has started the thread
        threading.Thread(target=_collect, name=_THREAD, daemon=True).start()


def return_large_blocks() -> None:
    """Make the C library return large blocks of memory to the system when they are freed.

    By default, after the first free of a large block, each thread retains blocks of up to 32 MiB (mallopt(3)).
    """
    with contextlib.suppress(AttributeError):  # not the GNU C library
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)


def _collect() -> None:
    counted = collected = time.monotonic()
    while True:
        time.sleep(YOUNG_SECONDS)
        gc.collect(1)
        now = time.monotonic()
        if now - counted < FULL_SECONDS:
            continue
        counted = now  # counting the objects pauses too
        if now - collected < CROWD_SECONDS and len(gc.get_objects(generation=2)) > CROWD:
            continue
        gc.collect()
        _trim()
        collected = now


def _trim() -> None:
    """Release the memory that the C library retains after `free`. This may be a lot after a large request."""
    with contextlib.suppress(AttributeError):  # not the GNU C library
        ctypes.CDLL(None).malloc_trim(0)  # without the GIL
