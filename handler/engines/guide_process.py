"""Where guides are tried: a process that has loaded what it takes, and for each guide a copy of it that may be lost.

A copy costs a fork instead of the seconds that loading takes, and what a bad guide leaves behind goes with it.
The other end is `engines/trial_process.py`.
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
from collections.abc import Callable
from typing import NamedTuple

from handler.core import Guide
from handler.engines.base import GuideTrial
from handler.engines.frames import HostGone, Messages, send
from handler.engines.process import die_with_parent

_REASON_CHARACTERS = 300


class Limits(NamedTuple):
    """What one trial may take: seconds of computing, bytes beyond what is loaded, and seconds by the clock.

    `nice` is how far it stands back for those who wait for tokens.
    """

    seconds: float
    memory: int
    patience: float
    nice: int


class Job(NamedTuple):
    """One trial; `excess` is what is said of a guide that takes too much memory."""

    guide: Guide
    limits: Limits
    excess: str


class Loaded(NamedTuple):
    """Guides can be tried from now on; `reason` says why not, and then the process ends."""

    reason: str = ""
    trace: str = ""


class Begun(NamedTuple):
    """A trial is under way; what ends without a verdict after this has gone beyond its limits."""


class Verdict(NamedTuple):
    """What came of a trial.

    Attributes:
        refusal: what is wrong with the guide; "" where nothing is.
        seconds: of computing that were needed to tell.
        kept: bytes that the engine keeps of it for as long as it lives.
    """

    refusal: str = ""
    seconds: float = 0.0
    kept: int = 0


def main(fd: int) -> None:
    """Load what the first message makes; then every message of one byte brings the socket of one trial."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    control = socket.socket(fileno=fd)
    with contextlib.suppress(HostGone):
        trial = _load(control)
        if trial is not None:
            _serve(control, trial)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _load(control: socket.socket) -> GuideTrial | None:
    try:
        make: Callable[[], GuideTrial] = Messages(control).next()
        trial = make()
    except HostGone:
        raise
    except Exception as error:  # foreign code: say why
        send(control, Loaded(f"{type(error).__name__}: {error}", traceback.format_exc()))
        return None
    gc.collect()
    gc.freeze()  # the copies share what is there, as long as nobody writes to it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    send(control, Loaded())
    return trial


def _serve(control: socket.socket, trial: GuideTrial) -> None:
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
                _try_one(channel, trial)


def _try_one(channel: socket.socket, trial: GuideTrial) -> None:
    """The copy's whole life."""
    try:
        die_with_parent()
        job: Job = Messages(channel).next()
        _be_quiet()
        _obey(job.limits)
        send(channel, Begun())
        send(channel, _verdict(trial, job)._replace(seconds=time.process_time()))
    finally:
        os._exit(0)


def _be_quiet() -> None:
    """What libraries write about a guide has its text in it, which no log may have."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _obey(limits: Limits) -> None:
    os.nice(limits.nice)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stack = resource.getrlimit(resource.RLIMIT_STACK)
    # Half of what the engine has: what goes deep here ends here.
    half = 4 << 20 if stack[0] == resource.RLIM_INFINITY else stack[0] // 2
    resource.setrlimit(resource.RLIMIT_STACK, (half, stack[1]))
    data = _data_bytes() + limits.memory
    resource.setrlimit(resource.RLIMIT_DATA, (data, data))
    signal.setitimer(signal.ITIMER_PROF, limits.seconds)  # both signals end the process, whatever it is in
    signal.setitimer(signal.ITIMER_REAL, limits.patience)


def _data_bytes() -> int:
    """What counts against RLIMIT_DATA already: all private memory that can be written."""
    with open("/proc/self/status", encoding="ascii") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["VmData"].split()[0]) << 10


def _verdict(trial: GuideTrial, job: Job) -> Verdict:
    try:
        return Verdict(kept=trial(job.guide) or 0)
    except MemoryError:
        return Verdict(job.excess)
    except Exception as error:  # as the engine itself would say of the request
        return Verdict((str(error).strip() or type(error).__name__)[:_REASON_CHARACTERS])
