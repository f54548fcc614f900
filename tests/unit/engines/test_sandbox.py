"""The sandbox's host with a scripted process, and what the process does, here in the test's own."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from handler.core.child_processes import Child
from handler.engines.process import sandbox
from handler.engines.process.ipc import ChannelClosed, Messages, send
from handler.engines.process.sandbox import (
    Done,
    Job,
    JobBegun,
    LimitExceeded,
    Limits,
    Loaded,
    MemoryLimitExceeded,
    NotRun,
    OutOfMemory,
    Prepared,
    Purpose,
    Raised,
    Sandbox,
    TooBusy,
)
from tests.servers import PATIENCE

PURPOSE = Purpose("large request bodies", "are read", "; use smaller ones")
LIMITS = Limits(seconds=3.0, memory=1 << 20, patience=60.0, nice=7)
Script = Callable[[socket.socket, Job], None]


def make() -> Any:
    return len


# -- the host ----------------------------------------------------------------------------------------------------------


class Process:
    """A process that loads as told, and does each of its jobs by the next script."""

    def __init__(self, channel: socket.socket, loaded: Loaded | None, scripts: list[Script | None]) -> None:
        self.pid, self._scripts, self._loaded = 1234, scripts, loaded
        self.killed = self.waited = False
        self.made: Any = None
        self.control = channel.dup()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            with contextlib.suppress(ChannelClosed, OSError), self.control:
                self.made = Messages(self.control).next()
                if self._loaded is None:
                    return
                send(self.control, self._loaded)
                while not self._loaded.reason:
                    data, fds, _, _ = socket.recv_fds(self.control, 1, 1)
                    if not data:
                        return
                    with socket.socket(fileno=fds[0]) as channel:
                        script = self._scripts.pop(0)
                        if script is None:
                            return
                        script(channel, Messages(channel).next())
        finally:
            self.ended.set()

    def kill(self) -> None:
        self.killed = True
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout: float | None = None) -> int:
        self.waited = self.ended.wait(PATIENCE if timeout is None else timeout)
        if not self.waited:
            raise subprocess.TimeoutExpired("process", timeout or PATIENCE)
        return 0

    status, end = Child.status, Child.end


class Host:
    """A sandbox whose processes are scripted."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *scripts: Script | None, make: Callable[[], Any] = make
    ) -> None:
        self.scripts = list(scripts)
        self.loaded: Loaded | OSError | None = Loaded()
        self.processes: list[Process] = []
        self.spent: list[float] = []
        self.sandbox = Sandbox(make, PURPOSE)
        monkeypatch.setattr(sandbox, "start", self.start)

    def start(self, function: str, channel: socket.socket) -> Process:
        assert function == "handler.engines.process.sandbox:main"
        if isinstance(self.loaded, OSError):
            raise self.loaded
        self.processes.append(Process(channel, self.loaded, self.scripts))
        return self.processes[-1]

    def run(self, data: bytes = b"", limits: Limits = LIMITS) -> list[Any]:
        return self.sandbox.run(Job("subject", limits, len(data)), data, self.spent.append)


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Host]]:
    made: list[Host] = []

    def make(*scripts: Script | None, **more: Any) -> Host:
        made.append(Host(monkeypatch, *scripts, **more))
        return made[-1]

    yield make
    for host in made:
        host.sandbox.close()
        for process in host.processes:
            process.thread.join(PATIENCE)
            assert not process.thread.is_alive()


Hosted = Callable[..., Host]


def says(*messages: Any) -> Script:
    def script(channel: socket.socket, job: Job) -> None:
        for message in messages:
            send(channel, message)

    return script


def read(channel: socket.socket, job: Job) -> None:
    send(channel, JobBegun())
    send(channel, channel.recv(job.size, socket.MSG_WAITALL) if job.size else b"nothing")
    send(channel, Done(0.25))


def test_a_jobs_results_and_its_seconds_come_back(hosted: Hosted) -> None:
    host = hosted(says(JobBegun(), "one", "two", Done(0.5)), read, read)
    assert host.run() == ["one", "two"]
    assert host.spent == [0.5]
    assert host.run(b"body") == [b"body"]
    assert host.run() == [b"nothing"]
    (process,) = host.processes
    assert process.made is make
    assert host.sandbox.pid == process.pid


def test_a_jobs_own_exception_is_raised_again(hosted: Hosted) -> None:
    host = hosted(says(JobBegun(), Raised(ValueError("no such schema"), 0.5)), read)
    with pytest.raises(ValueError, match="no such schema"):
        host.run()
    assert host.spent == [0.5]
    assert host.run() == [b"nothing"]
    assert len(host.processes) == 1


def test_a_job_out_of_memory_is_told_apart(hosted: Hosted) -> None:
    host = hosted(says(JobBegun(), OutOfMemory()))
    with pytest.raises(MemoryLimitExceeded):
        host.run()
    assert host.spent == [3.0], "the limit: nobody knows how much it was"


def test_a_job_that_ends_without_a_word_was_stopped(hosted: Hosted) -> None:
    host = hosted(says(JobBegun()), read)
    with pytest.raises(LimitExceeded):
        host.run()
    assert host.spent == [3.0]
    assert host.run() == [b"nothing"]
    assert len(host.processes) == 1, "its fork ended alone"


def test_a_job_that_waits_for_the_machine_is_no_fault_of_its_own(
    hosted: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def script(channel: socket.socket, job: Job) -> None:
        send(channel, JobBegun())
        assert channel.recv(5) == b"go on"
        now[0] += 59.41

    host = hosted(script)
    with pytest.raises(TooBusy, match="the machine is too busy"):
        host.run(b"go on")
    assert host.spent == []


def test_a_process_that_ended_between_two_jobs_is_replaced(hosted: Hosted) -> None:
    host = hosted(read, read)
    host.run()
    host.processes[0].kill()
    host.processes[0].wait()
    assert host.run() == [b"nothing"]
    assert len(host.processes) == 2


def test_a_job_whose_process_ended_is_run_once_more(hosted: Hosted) -> None:
    host = hosted(None, read)
    assert host.run() == [b"nothing"]
    first, second = host.processes
    assert (first.waited, second.waited) == (True, False)
    host = hosted(None, None)
    with pytest.raises(NotRun, match=r"^the process where large request bodies are read does not respond$"):
        host.run()
    assert len(host.processes) == 2


def test_a_job_that_ended_with_its_process_is_run_once_more(hosted: Hosted) -> None:
    def dies(channel: socket.socket, job: Job) -> None:
        send(channel, JobBegun())
        host.processes[-1].control.close()  # as the kernel does before the process counts as ended
        host.processes[-1].ended.set()
        raise ChannelClosed

    host = hosted(dies, dies)
    with pytest.raises(NotRun, match=r"^the process where large request bodies are read has ended$"):
        host.run()
    assert len(host.processes) == 2
    assert host.spent == []


def test_data_that_the_job_does_not_take_ends_it(hosted: Hosted) -> None:
    host = hosted(says(JobBegun()))
    with pytest.raises(LimitExceeded):
        host.run(bytes(1 << 22))


def test_a_failed_start_is_told_and_not_repeated_at_once(
    hosted: Hosted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    host = hosted(read)
    host.loaded = Loaded("ImportError: no module", "Traceback: here")
    told = "large request bodies cannot be read; use smaller ones: ImportError: no module"
    for later, starts in ((0.0, 1), (29.9, 1), (0.1, 2)):
        now[0] += later
        with pytest.raises(NotRun) as raised:
            host.sandbox.start()
        assert str(raised.value) == told
        assert len(host.processes) == starts
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR].count(told) == 2
    assert "Traceback: here" in caplog.text
    assert all(process.waited for process in host.processes)
    assert host.sandbox.pid is None
    host.loaded = Loaded()
    now[0] += 30
    assert host.run() == [b"nothing"]


@pytest.mark.parametrize(
    ("loaded", "told"),
    [(None, "the process ended while it was loading"), (OSError(12, "Cannot allocate memory"), "Cannot allocate")],
)
def test_a_process_that_does_not_load_is_told(hosted: Hosted, loaded: Loaded | OSError | None, told: str) -> None:
    host = hosted()
    host.loaded = loaded
    with pytest.raises(NotRun, match=f"^large request bodies cannot be read; use smaller ones: .*{told}"):
        host.run()


def test_work_that_cannot_be_sent_is_told(hosted: Hosted) -> None:
    host = hosted(make=lambda: make())
    with pytest.raises(NotRun, match=r"cannot be read; use smaller ones: .*(pickle|local object)"):
        host.run()


def test_a_closed_sandbox_runs_nothing(hosted: Hosted) -> None:
    host = hosted(read)
    host.run()
    host.sandbox.close()
    host.processes[0].thread.join(PATIENCE)
    for call in (host.run, host.sandbox.start):
        with pytest.raises(NotRun, match=r"^the server is stopping$"):
            call()
    (process,) = host.processes
    assert process.ended.is_set()
    assert not process.killed


def test_a_sandbox_that_is_closed_while_it_loads_is_stopping(hosted: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    host = hosted()
    start = host.start

    def closing(function: str, channel: socket.socket) -> Process:
        host.sandbox.close()
        host.loaded = None
        return start(function, channel)

    monkeypatch.setattr(sandbox, "start", closing)
    with pytest.raises(NotRun, match=r"^the server is stopping$"):
        host.run()
    assert host.processes[0].waited


def test_a_started_sandbox_needs_no_second_start(
    hosted: Hosted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    host = hosted(read)
    with caplog.at_level(logging.DEBUG, "handler.trials"):
        host.sandbox.start()
    assert "large request bodies are read by process 1234, loaded in 0.0 s" in caplog.text
    host.sandbox.start()
    assert host.run() == [b"nothing"]
    assert len(host.processes) == 1


def test_a_process_that_takes_no_jobs_is_started_twice_at_most(hosted: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> int:
        raise BrokenPipeError

    host = hosted()
    monkeypatch.setattr(socket, "send_fds", refuse)
    with pytest.raises(NotRun, match=r"^the process where large request bodies are read is not running$"):
        host.run()
    assert [process.waited for process in host.processes] == [True, True]


def test_a_sandbox_that_is_closed_before_its_process_starts_starts_none(
    hosted: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, pair = hosted(), socket.socketpair

    def closing() -> tuple[socket.socket, socket.socket]:
        host.sandbox.close()
        return pair()

    monkeypatch.setattr(socket, "socketpair", closing)
    with pytest.raises(NotRun, match=r"^the server is stopping$"):
        host.sandbox.start()
    assert host.processes == []


# -- the process -------------------------------------------------------------------------------------------------------


@pytest.fixture
def channels() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The host's end and the process's."""
    host, process = socket.socketpair()
    with host, process:
        host.settimeout(PATIENCE)
        process.settimeout(PATIENCE)
        yield host, process


Channels = tuple[socket.socket, socket.socket]


def echo(subject: Any, data: memoryview) -> Iterator[Any]:
    if isinstance(subject, BaseException):
        raise subject
    yield subject
    yield bytes(data)


def made() -> Any:
    return echo


def broken() -> Any:
    raise RuntimeError("no compiler")


def note(event: str) -> None:
    """Say what the work does before its limits apply; see `forked`."""


def prepares() -> Any:
    return Prepared(echo, lambda: note("prepared"))


class Exited(Exception):
    pass


@pytest.fixture
def forked(channels: Channels, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the process and its fork do to themselves, which is not done here. This process is its own fork."""
    found: list[Any] = []
    null = os.stat(os.devnull)

    @contextlib.contextmanager
    def opened(path: str, mode: str = "r", **more: Any) -> Iterator[Any]:
        assert mode == "w"
        yield SimpleNamespace(write=lambda text: found.append((path, text)))

    def end(status: int) -> None:
        found.append(("exit", status))
        raise Exited

    def replace(fd: int, stream: int) -> None:
        assert os.fstat(fd).st_rdev == null.st_rdev
        found.append(("silent", stream))
        if stream == 2:
            os.close(fd)

    def record(*event: Any) -> None:
        found.append(event)

    own = {"_exit": end, "dup2": replace, "nice": lambda more: record("nice", more), "fork": lambda: 0}
    monkeypatch.setattr(sandbox, "os", SimpleNamespace(**{**vars(os), **own}))
    monkeypatch.setattr(sandbox, "die_with_parent", lambda: record("ends with its parent"))
    monkeypatch.setattr(sandbox, "serving_host", lambda fd: contextlib.nullcontext({"5": channels[1]}[fd]))
    monkeypatch.setattr(sandbox, "open", opened, raising=False)
    monkeypatch.setattr(sandbox, "status_bytes", {"VmData": 1000}.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", record)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (8 << 20, 9 << 20))
    monkeypatch.setattr(signal, "setitimer", record)
    monkeypatch.setattr(signal, "signal", record)
    monkeypatch.setattr(threading, "stack_size", partial(record, "stack"))
    monkeypatch.setattr(gc, "collect", partial(record, "collected"))
    monkeypatch.setattr(gc, "freeze", partial(record, "frozen"))
    monkeypatch.setattr(sys.modules[__name__], "note", record)
    return found


def hand_over(control: socket.socket) -> socket.socket:
    """Send a job's channel to the process, and return the host's end."""
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE)
    with theirs:
        socket.send_fds(control, [b"\0"], [theirs.fileno()])
    return ours


@contextlib.contextmanager
def host_that(acts: Callable[[], object]) -> Iterator[None]:
    """Run the host's side on a thread, while the process runs in this one."""
    with ThreadPoolExecutor(1) as threads:
        acting = threads.submit(acts)
        yield
        acting.result(PATIENCE)


def load(host: socket.socket, make: Callable[[], Any] = made) -> None:
    send(host, make)
    assert Messages(host).next() == Loaded()


def outcome(
    channels: Channels, subject: Any, data: bytes = b"", size: int | None = None, make: Callable[[], Any] = made
) -> list[Any]:
    """Have the process run a job whose host sends `data` and no more, and return what it sends to the host."""
    host, _ = channels
    found: list[Any] = []

    def act() -> None:
        load(host, make)
        with hand_over(host) as channel:
            send(channel, Job(subject, LIMITS, len(data) if size is None else size))
            messages = Messages(channel)
            assert isinstance(messages.next(), JobBegun)
            if data:  # without data the job may have ended already
                channel.sendall(data)
                channel.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ChannelClosed):
                while True:
                    found.append(messages.next())

    with host_that(act), pytest.raises(Exited):
        sandbox.main("5")
    return found


def test_a_job_gets_its_data_and_sends_each_result(channels: Channels, forked: list[Any]) -> None:
    *results, done = outcome(channels, "subject", b"all of it")
    assert isinstance(done, Done)
    assert results == ["subject", b"all of it"]


@pytest.mark.parametrize(("subject", "end"), [("subject", Done), (ValueError("x"), Raised)])
def test_a_jobs_seconds_are_those_of_the_processor(
    subject: Any, end: type[Any], channels: Channels, forked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "process_time", iter([10.0, 12.5]).__next__)
    *_, found = outcome(channels, subject)
    assert isinstance(found, end)
    assert found.seconds == 2.5


def test_a_jobs_exception_is_sent(channels: Channels, forked: list[Any]) -> None:
    (raised,) = outcome(channels, ValueError("no such schema"))
    assert repr(raised.error) == repr(ValueError("no such schema"))


def test_a_memory_error_is_the_limit_of_memory(channels: Channels, forked: list[Any]) -> None:
    assert outcome(channels, MemoryError()) == [OutOfMemory()]


def test_a_job_ends_with_its_host(channels: Channels, forked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda error: errors.append(error.exc_type))
    assert outcome(channels, "subject", b"not all", size=100) == []
    assert errors == [ChannelClosed]


@pytest.mark.parametrize(("stack", "half"), [(resource.RLIM_INFINITY, 4 << 20), (8 << 20, 4 << 20), (6000, 1 << 16)])
def test_a_job_is_limited_in_stack_memory_and_time(
    channels: Channels, forked: list[Any], monkeypatch: pytest.MonkeyPatch, stack: int, half: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (stack, 9 << 20))
    outcome(channels, "subject")
    data = 1000 + half + (1 << 20)
    limits = [
        ("/proc/self/oom_score_adj", "1000"),
        (resource.RLIMIT_CORE, (0, 0)),
        ("stack", half),
        (resource.RLIMIT_DATA, (data, data)),
        (signal.ITIMER_PROF, 3.0),
        (signal.ITIMER_REAL, 60.0),
    ]
    assert [event for event in forked if event in limits] == limits


def test_memory_is_told_in_bytes() -> None:
    with open("/proc/self/status", encoding="ascii") as status:
        kilobytes = next(int(line.split()[1]) for line in status if line.startswith("VmLib:"))
    assert sandbox.status_bytes("VmLib") == 1024 * kilobytes


def test_a_fork_prepares_before_the_limits_and_then_works(channels: Channels, forked: list[Any]) -> None:
    *results, done = outcome(channels, "subject", make=prepares)
    process = [("collected",), ("frozen",), (signal.SIGCHLD, signal.SIG_IGN)]
    fork = [("ends with its parent",), ("silent", 1), ("silent", 2), ("nice", 7), ("prepared",)]
    assert forked[:9] == [*process, *fork, ("/proc/self/oom_score_adj", "1000")]
    assert forked[-1] == ("exit", 0)
    assert results == ["subject", b""]
    assert isinstance(done, Done)


def test_a_fork_whose_host_has_gone_ends(channels: Channels, forked: list[Any]) -> None:
    host, _ = channels

    def act() -> None:
        load(host)
        hand_over(host).close()

    with host_that(act), pytest.raises(Exited):
        sandbox.main("5")
    assert forked[3:] == [("ends with its parent",), ("exit", 0)]


def test_each_job_runs_in_a_fork_and_a_fork_that_fails_costs_its_job_only(
    channels: Channels, forked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, process = channels
    forks: list[Any] = [1234, OSError("no memory"), 0]
    closed: list[bool] = []

    def fork() -> int:
        found = forks.pop(0)
        if isinstance(found, OSError):
            raise found
        return int(found)

    monkeypatch.setattr("handler.engines.process.sandbox.os.fork", fork)
    monkeypatch.setattr(sandbox, "die_with_parent", lambda: closed.append(process.fileno() == -1))

    def act() -> None:
        load(host)
        with hand_over(host) as first, hand_over(host) as second, hand_over(host) as third:
            send(third, Job("subject", LIMITS))
            messages = Messages(third)
            assert isinstance(messages.next(), JobBegun)
            assert [messages.next(), messages.next()] == ["subject", b""]
            assert isinstance(messages.next(), Done)
            assert [first.recv(1), second.recv(1)] == [b"", b""], "the process keeps no job's channel"

    with host_that(act), pytest.raises(Exited):
        sandbox.main("5")
    assert closed == [True], "a fork has no part in the process's own channel"


@pytest.mark.parametrize(("make", "reason"), [(made, ""), (broken, "RuntimeError: no compiler")])
def test_the_process_says_that_it_is_loaded_or_why_it_is_not(
    channels: Channels, forked: list[Any], make: Callable[[], Any], reason: str
) -> None:
    host, _ = channels
    send(host, make)
    host.shutdown(socket.SHUT_WR)
    sandbox.main("5")
    loaded = Messages(host).next()
    assert loaded.reason == reason
    assert ("no compiler" in loaded.trace) is bool(reason)
    assert forked == ([] if reason else [("collected",), ("frozen",), (signal.SIGCHLD, signal.SIG_IGN)])


def test_a_process_whose_host_goes_before_it_is_loaded_ends(channels: Channels, forked: list[Any]) -> None:
    host, _ = channels
    host.close()
    sandbox.main("5")
    assert forked == []
