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
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from handler.engines.process import sandbox
from handler.engines.process.ipc import ChannelClosed, Messages, send
from handler.engines.process.sandbox import (
    Begun,
    Done,
    Job,
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
        self._control = channel.dup()
        self._ended = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            with contextlib.suppress(ChannelClosed, OSError), self._control:
                self.made = Messages(self._control).next()
                if self._loaded is None:
                    return
                send(self._control, self._loaded)
                while not self._loaded.reason:
                    data, fds, _, _ = socket.recv_fds(self._control, 1, 1)
                    if not data:
                        return
                    with socket.socket(fileno=fds[0]) as channel:
                        script = self._scripts.pop(0)
                        if script is None:
                            return
                        script(channel, Messages(channel).next())
        finally:
            self._ended.set()

    def kill(self) -> None:
        self.killed = True
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None and not self._ended.is_set():
            raise subprocess.TimeoutExpired("process", timeout)
        self.waited = self._ended.wait(PATIENCE)
        return 0


class Host:
    """A sandbox whose processes are scripted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *scripts: Script | None) -> None:
        self.scripts = list(scripts)
        self.loaded: Loaded | OSError | None = Loaded()
        self.processes: list[Process] = []
        self.spent: list[float] = []
        self.sandbox = Sandbox(make, PURPOSE)
        monkeypatch.setattr(sandbox, "start", self._start)

    def _start(self, function: str, channel: socket.socket) -> Process:
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

    def make(*scripts: Script | None) -> Host:
        made.append(Host(monkeypatch, *scripts))
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
    send(channel, Begun())
    send(channel, channel.recv(job.size, socket.MSG_WAITALL) if job.size else b"nothing")
    send(channel, Done(0.25))


def test_a_jobs_results_and_its_seconds_come_back(hosted: Hosted) -> None:
    host = hosted(says(Begun(), "one", "two", Done(0.5)), read, read)
    assert host.run() == ["one", "two"]
    assert host.spent == [0.5]
    assert host.run(b"body") == [b"body"]
    assert host.run() == [b"nothing"]
    (process,) = host.processes
    assert process.made is make
    assert host.sandbox.pid == process.pid


def test_a_jobs_own_exception_is_raised_again(hosted: Hosted) -> None:
    host = hosted(says(Begun(), Raised(ValueError("no such schema"), 0.5)), read)
    with pytest.raises(ValueError, match="no such schema"):
        host.run()
    assert host.spent == [0.5]
    assert host.run() == [b"nothing"]
    assert len(host.processes) == 1


def test_a_job_out_of_memory_is_told_apart(hosted: Hosted) -> None:
    host = hosted(says(Begun(), OutOfMemory()))
    with pytest.raises(MemoryLimitExceeded):
        host.run()
    assert host.spent == [3.0], "the limit: nobody knows how much it was"


def test_a_job_that_ends_without_a_word_was_stopped(hosted: Hosted) -> None:
    host = hosted(says(Begun()), read)
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
        send(channel, Begun())
        assert Messages(channel).next() == "go on"
        now[0] += 59.41

    host = hosted(script)
    results = sandbox._results

    def go_on(channel: socket.socket, *more: Any) -> list[Any]:
        send(channel, "go on")
        return results(channel, *more)

    monkeypatch.setattr(sandbox, "_results", go_on)
    with pytest.raises(TooBusy, match="the machine is too busy"):
        host.run()
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
    assert (first.killed, second.killed) == (True, False)
    host = hosted(None, None)
    with pytest.raises(NotRun, match=r"^the process where large request bodies are read does not respond$"):
        host.run()
    assert len(host.processes) == 2


def test_a_job_that_ended_with_its_process_is_run_once_more(hosted: Hosted) -> None:
    def dies(channel: socket.socket, job: Job) -> None:
        send(channel, Begun())
        host.processes[-1]._control.close()  # as the kernel does before the process counts as ended
        host.processes[-1]._ended.set()
        raise ChannelClosed

    host = hosted(dies, dies)
    with pytest.raises(NotRun, match=r"^the process where large request bodies are read has ended$"):
        host.run()
    assert len(host.processes) == 2
    assert host.spent == []


def test_data_that_the_job_does_not_take_ends_it(hosted: Hosted) -> None:
    host = hosted(says(Begun()))
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
    assert all(process.killed for process in host.processes)
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
    host = hosted()
    host.sandbox._make = lambda: make()
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
    assert process._ended.is_set()
    assert not process.killed


def test_a_sandbox_that_is_closed_while_it_loads_is_stopping(hosted: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    host = hosted()
    start = host._start

    def closing(function: str, channel: socket.socket) -> Process:
        host.sandbox._closed = True
        host.loaded = None
        return start(function, channel)

    monkeypatch.setattr(sandbox, "start", closing)
    with pytest.raises(NotRun, match=r"^the server is stopping$"):
        host.run()
    assert host.processes[0].killed


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
    assert [process.killed for process in host.processes] == [True, True]


def test_a_sandbox_that_is_closed_before_its_process_starts_starts_none(
    hosted: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, pair = hosted(), socket.socketpair

    def closing() -> tuple[socket.socket, socket.socket]:
        host.sandbox._closed = True
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


def outcome(channels: Channels, subject: Any, data: bytes = b"") -> tuple[Any, list[Any]]:
    host, process = channels
    host.sendall(data)
    found = sandbox._outcome(process, echo, Job(subject, LIMITS, len(data)))
    process.shutdown(socket.SHUT_WR)
    sent: list[Any] = []
    with contextlib.suppress(ChannelClosed):
        messages = Messages(host)
        while True:
            sent.append(messages.next())
    return found, sent


def test_a_job_gets_its_data_and_sends_each_result(channels: Channels) -> None:
    done, sent = outcome(channels, "subject", b"all of it")
    assert isinstance(done, Done)
    assert sent == ["subject", b"all of it"]


def test_a_jobs_seconds_are_those_of_the_processor(channels: Channels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "process_time", iter([10.0, 12.5, 20.0, 21.5]).__next__)
    done, _ = outcome(channels, "subject")
    assert done.seconds == 2.5
    with contextlib.suppress(OSError):
        found = sandbox._outcome(channels[1], echo, Job(ValueError("x"), LIMITS))
    assert isinstance(found, Raised)
    assert found.seconds == 1.5


def test_a_jobs_exception_is_sent_without_its_frames(channels: Channels) -> None:
    raised, sent = outcome(channels, ValueError("no such schema"))
    assert str(raised.error) == "no such schema"
    assert raised.error.__traceback__ is None
    assert sent == []


def test_a_memory_error_is_the_limit_of_memory(channels: Channels) -> None:
    assert outcome(channels, MemoryError()) == (OutOfMemory(), [])


def test_a_job_ends_with_its_host(channels: Channels) -> None:
    host, process = channels
    host.sendall(b"not all")
    host.close()
    with pytest.raises(ChannelClosed):
        sandbox._outcome(process, echo, Job("subject", LIMITS, 100))


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """What the process sets for itself, which is not set here."""
    found: dict[Any, Any] = {}

    @contextlib.contextmanager
    def opened(path: str, mode: str = "r", **more: Any) -> Iterator[Any]:
        if mode == "r":
            with open(path, **more) as file:
                yield file
            return

        class File:
            def write(self, text: str) -> None:
                found[path] = text

        yield File()

    monkeypatch.setattr(sandbox, "open", opened, raising=False)
    monkeypatch.setattr(resource, "setrlimit", found.__setitem__)
    monkeypatch.setattr(signal, "setitimer", found.__setitem__)
    return found


@pytest.mark.parametrize(("stack", "half"), [(resource.RLIM_INFINITY, 4 << 20), (8 << 20, 4 << 20), (6000, 1 << 16)])
def test_a_job_is_limited_in_stack_memory_and_time(
    limits: dict[Any, Any], monkeypatch: pytest.MonkeyPatch, stack: int, half: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (stack, 9 << 20))
    monkeypatch.setattr(sandbox, "status_bytes", {"VmData": 1000}.__getitem__)
    monkeypatch.setattr(threading, "stack_size", partial(limits.__setitem__, "stack"))
    sandbox._apply(LIMITS)
    data = 1000 + half + (1 << 20)
    assert limits == {
        "/proc/self/oom_score_adj": "1000",
        resource.RLIMIT_CORE: (0, 0),
        "stack": half,
        resource.RLIMIT_DATA: (data, data),
        signal.ITIMER_PROF: 3.0,
        signal.ITIMER_REAL: 60.0,
    }


def test_memory_is_told_in_bytes() -> None:
    with open("/proc/self/status", encoding="ascii") as status:
        kilobytes = next(int(line.split()[1]) for line in status if line.startswith("VmLib:"))
    assert sandbox.status_bytes("VmLib") == 1024 * kilobytes


class Exited(Exception):
    pass


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a fork of the process does to itself, which is not done here."""
    found: list[Any] = []

    def end(status: int) -> None:
        found.append(("exit", status))
        raise Exited

    null = os.stat(os.devnull)

    def replace(fd: int, stream: int) -> None:
        assert os.fstat(fd).st_rdev == null.st_rdev
        found.append(("silent", stream))
        if stream == 2:
            os.close(fd)

    own = {"_exit": end, "dup2": replace, "nice": lambda more: found.append(("nice", more))}
    monkeypatch.setattr(sandbox, "os", SimpleNamespace(**{**vars(os), **own}))
    monkeypatch.setattr(sandbox, "die_with_parent", lambda: found.append("ends with its parent"))
    monkeypatch.setattr(sandbox, "_apply", lambda limits: found.append(limits))
    return found


def test_a_fork_prepares_before_the_limits_and_then_works(channels: Channels, forked: list[Any]) -> None:
    host, process = channels
    send(host, Job("subject", LIMITS))
    with pytest.raises(Exited):
        sandbox._run_job(process, Prepared(echo, lambda: forked.append("prepared")))
    own = ["ends with its parent", ("silent", 1), ("silent", 2), ("nice", 7), "prepared", LIMITS, ("exit", 0)]
    assert forked == own
    messages = Messages(host)
    assert isinstance(messages.next(), Begun)
    assert [messages.next(), messages.next()] == ["subject", b""]
    assert isinstance(messages.next(), Done)


def test_a_fork_whose_host_has_gone_ends(channels: Channels, forked: list[Any]) -> None:
    host, process = channels
    host.close()
    with pytest.raises(Exited):
        sandbox._run_job(process, echo)
    assert forked == ["ends with its parent", ("exit", 0)]


def test_each_job_runs_in_a_fork_and_a_fork_that_fails_costs_its_job_only(
    channels: Channels, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, process = channels
    forks: list[Any] = [1234, OSError("no memory"), 0]
    jobs: list[bool] = []

    def fork() -> int:
        found = forks.pop(0)
        if isinstance(found, OSError):
            raise found
        return int(found)

    def run_job(channel: socket.socket, work: Any) -> None:
        jobs.append(work is echo and process.fileno() == -1)
        raise Exited

    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(sandbox, "_run_job", run_job)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for _ in range(3):
            socket.send_fds(host, [b"\0"], [theirs.fileno()])
        theirs.close()
        with pytest.raises(Exited):
            sandbox._serve(process, echo)
        assert ours.recv(1) == b"", "the process keeps no job's channel"
    assert jobs == [True]


def test_without_a_host_there_are_no_more_jobs(channels: Channels) -> None:
    host, process = channels
    host.close()
    sandbox._serve(process, echo)


def made() -> Any:
    return echo


def broken() -> Any:
    raise RuntimeError("no compiler")


@pytest.mark.parametrize(("make", "reason"), [(made, ""), (broken, "RuntimeError: no compiler")])
def test_the_process_says_that_it_is_loaded_or_why_it_is_not(
    channels: Channels, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], reason: str
) -> None:
    host, process = channels
    done: list[Any] = []
    monkeypatch.setattr(signal, "signal", lambda *arguments: done.append(arguments))
    monkeypatch.setattr(gc, "collect", lambda: done.append("collected"))
    monkeypatch.setattr(gc, "freeze", lambda: done.append("frozen"))
    monkeypatch.setattr(sandbox, "serving_host", lambda fd: contextlib.nullcontext({"5": process}[fd]))
    served: list[Any] = []
    monkeypatch.setattr(sandbox, "_serve", lambda control, work: served.append(work))
    send(host, make)
    sandbox.main("5")
    loaded = Messages(host).next()
    assert loaded.reason == reason
    assert ("no compiler" in loaded.trace) == bool(reason)
    assert served == ([] if reason else [echo])
    assert done == ([] if reason else ["collected", "frozen", (signal.SIGCHLD, signal.SIG_IGN)])


def test_a_host_that_ends_before_the_process_has_loaded_is_no_error(
    channels: Channels, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, process = channels
    host.close()
    monkeypatch.setattr(sandbox, "serving_host", lambda fd: contextlib.nullcontext(process))
    sandbox.main("5")
    with pytest.raises(ChannelClosed):
        sandbox._load(process)
