"""The process that works on untrusted input: for each piece a copy (fork) of it, within limits, that may be lost.

A fork costs milliseconds instead of the seconds that loading takes, and all memory goes with it.
The host's end is `engines/structured_output/sandbox.py`.
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

from handler.engines.process.engine_process import die_with_parent
from handler.engines.process.ipc import ChannelClosed, Messages, send, wait

Work = Callable[[Any, memoryview], Iterator[Any]]
"""Takes a job's subject and data, and yields what the host gets; what it raises is sent there too."""


class Limits(NamedTuple):
    """What one trial may take: seconds of computing, bytes beyond what is loaded, and seconds by the clock.

    `nice` is how far it stands back for those who wait for tokens.
    """

    seconds: float
    memory: int
    patience: float
    nice: int


class Job(NamedTuple):
    """One piece of work; after it `size` bytes of data follow as they are."""

    subject: Any
    limits: Limits
    size: int = 0


class Loaded(NamedTuple):
    """Jobs can be sent from now on; `reason` says why not, and then the process ends."""

    reason: str = ""
    trace: str = ""


class Begun(NamedTuple):
    """A job is under way; one that ends without `Done` or `Raised` after this has gone beyond its limits."""


class Done(NamedTuple):
    """All that a job yielded has been sent; it took so many seconds of computing."""

    seconds: float


class Raised(NamedTuple):
    """A job ended with an exception."""

    error: Exception


class OutOfMemory(NamedTuple):
    """A job needed more memory than its limit."""


def main(fd: int) -> None:
    """Load what the first message makes; then every message of one byte brings the socket of one job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    control = socket.socket(fileno=fd)
    with contextlib.suppress(ChannelClosed):
        work = _load(control)
        if work is not None:
            _serve(control, work)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _load(control: socket.socket) -> Work | None:
    try:
        make: Callable[[], Work] = Messages(control).next()
        work = make()
    except ChannelClosed:
        raise
    except Exception as error:  # foreign code: say why
        send(control, Loaded(f"{type(error).__name__}: {error}", traceback.format_exc()))
        return None
    gc.collect()
    gc.freeze()  # the copies share what is there, as long as nobody writes to it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    send(control, Loaded())
    return work


def _serve(control: socket.socket, work: Work) -> None:
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        with socket.socket(fileno=fds[0]) as channel:
            try:
                pid = os.fork()
            except OSError:  # no room for one: the host sees that nothing has begun
                continue
            if pid == 0:
                control.close()
                _do_one(channel, work)


def _do_one(channel: socket.socket, work: Work) -> None:
    """The copy's whole life."""
    try:
        die_with_parent()
        job: Job = Messages(channel).next()
        _be_quiet()
        _obey(job.limits)
        send(channel, Begun())
        send(channel, _outcome(channel, work, job))
    finally:
        os._exit(0)


def _outcome(channel: socket.socket, work: Work, job: Job) -> Done | Raised | OutOfMemory:
    try:
        for result in work(job.subject, _received(channel, job.size)):
            send(channel, result)
        return Done(time.process_time())
    except MemoryError:
        return OutOfMemory()
    except ChannelClosed:
        raise
    except Exception as error:
        return Raised(error.with_traceback(None))


def _received(channel: socket.socket, size: int) -> memoryview:
    data = memoryview(bytearray(size))
    at = 0
    while at < size:
        wait(channel)
        if not (count := channel.recv_into(data[at:])):
            raise ChannelClosed
        at += count
    return data


def _be_quiet() -> None:
    """What libraries write about a client's input has its text in it, which no log may have."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _obey(limits: Limits) -> None:
    os.nice(limits.nice)
    _die_first()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stack = resource.getrlimit(resource.RLIMIT_STACK)
    # Half of what the engine has: what goes deep here ends here.
    half = 4 << 20 if stack[0] == resource.RLIM_INFINITY else stack[0] // 2
    resource.setrlimit(resource.RLIMIT_STACK, (half, stack[1]))
    data = _data_bytes() + limits.memory
    resource.setrlimit(resource.RLIMIT_DATA, (data, data))
    signal.setitimer(signal.ITIMER_PROF, limits.seconds)  # both signals end the process, whatever it is in
    signal.setitimer(signal.ITIMER_REAL, limits.patience)


def _die_first() -> None:
    """Where the machine has no memory left, the kernel ends this rather than the engine."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


def _data_bytes() -> int:
    """What counts against RLIMIT_DATA already: all private memory that can be written."""
    with open("/proc/self/status", encoding="ascii") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["VmData"].split()[0]) << 10
