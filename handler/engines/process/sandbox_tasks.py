"""Process of the sandbox: it runs each job in a fork of itself, within limits.

A fork takes milliseconds where loading takes seconds, and its end frees all memory. The host's end is `sandbox.py`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from handler.core.child_processes import die_with_parent
from handler.engines.process.ipc import ChannelClosed, Messages, send, wait

Work = Callable[[Any, memoryview], Iterator[Any]]
"""Gets a job's subject and data, and yields results for the host; an exception is sent there too."""


class Prepared(NamedTuple):
    """Work that each copy of the process prepares once more, as for threads, which a fork loses. No limit counts it."""

    work: Work
    prepare: Callable[[], object]


class Limits(NamedTuple):
    """Limits of one job.

    Attributes:
        seconds: of CPU time.
        memory: bytes, beyond the loaded process.
        patience: seconds by the clock.
        nice: added to the process's niceness, so that token generation goes first.
    """

    seconds: float
    memory: int
    patience: float
    nice: int


class Job(NamedTuple):
    """One piece of work; `size` raw bytes of data follow it."""

    subject: Any
    limits: Limits
    size: int = 0


class Loaded(NamedTuple):
    """The process is ready for jobs; with a `reason` it is not, and ends."""

    reason: str = ""
    trace: str = ""


class Begun(NamedTuple):
    """A job runs; if neither `Done` nor `Raised` follows, it has exceeded its limits."""


class Done(NamedTuple):
    """A job has ended after `seconds` of CPU time; all its results have been sent."""

    seconds: float


class Raised(NamedTuple):
    """A job ended with an exception, after `seconds` of CPU time."""

    error: Exception
    seconds: float


class OutOfMemory(NamedTuple):
    """A job exceeded its memory limit."""


def main(fd: str) -> None:
    """Call the function in the first message for the work; each further message of one byte carries a job's socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    control = socket.socket(fileno=int(fd))
    with contextlib.suppress(ChannelClosed):
        work = _load(control)
        if work is not None:
            _serve(control, work)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _load(control: socket.socket) -> Work | Prepared | None:
    try:
        make: Callable[[], Work | Prepared] = Messages(control).next()
        work = make()
    except ChannelClosed:
        raise
    except Exception as error:  # foreign code: report it to the host
        send(control, Loaded(f"{type(error).__name__}: {error}", traceback.format_exc()))
        return None
    gc.collect()
    gc.freeze()  # forks share memory that nobody writes to
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    send(control, Loaded())
    return work


def _serve(control: socket.socket, work: Work | Prepared) -> None:
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        with socket.socket(fileno=fds[0]) as channel:
            try:
                pid = os.fork()
            except OSError:  # out of memory or processes: the host sees that the job has not begun
                continue
            if pid == 0:
                control.close()
                _run_job(channel, work)


def _run_job(channel: socket.socket, work: Work | Prepared) -> None:
    """Run one job, then end the process."""
    try:
        die_with_parent()
        job: Job = Messages(channel).next()
        _silence()
        os.nice(job.limits.nice)
        if isinstance(work, Prepared):
            work.prepare()
            work = work.work
        _apply(job.limits)
        send(channel, Begun())
        send(channel, _outcome(channel, work, job))
    finally:
        os._exit(0)


def _outcome(channel: socket.socket, work: Work, job: Job) -> Done | Raised | OutOfMemory:
    began = time.process_time()
    try:
        for result in work(job.subject, _receive(channel, job.size)):
            send(channel, result)
        return Done(time.process_time() - began)
    except MemoryError:
        return OutOfMemory()
    except ChannelClosed:
        raise
    except Exception as error:  # foreign code: raised again on the host's side
        return Raised(error.with_traceback(None), time.process_time() - began)


def _receive(channel: socket.socket, size: int) -> memoryview:
    data = memoryview(bytearray(size))
    num_received = 0
    while num_received < size:
        wait(channel)
        if not (count := channel.recv_into(data[num_received:])):
            raise ChannelClosed
        num_received += count
    return data


def _silence() -> None:
    """Close stdout and stderr: libraries write clients' text there, which no log may hold."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def _apply(limits: Limits) -> None:
    _prefer_for_oom_kill()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stack = resource.getrlimit(resource.RLIMIT_STACK)
    # Half of the engine's stack, so that deep recursion ends here and not there.
    half = 4 << 20 if stack[0] == resource.RLIM_INFINITY else stack[0] // 2
    resource.setrlimit(resource.RLIMIT_STACK, (half, stack[1]))
    data = status_bytes("VmData") + limits.memory  # RLIMIT_DATA counts all private writable memory
    resource.setrlimit(resource.RLIMIT_DATA, (data, data))
    signal.setitimer(signal.ITIMER_PROF, limits.seconds)  # both signals end the process, even inside C code
    signal.setitimer(signal.ITIMER_REAL, limits.patience)


def _prefer_for_oom_kill() -> None:
    """Have the kernel kill this process before the engine when the machine runs out of memory."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


def status_bytes(field: str) -> int:
    """Read an amount of this process's memory from /proc/self/status, in bytes."""
    with open("/proc/self/status", encoding="ascii") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields[field].split()[0]) << 10
