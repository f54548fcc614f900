"""A server whose event loop stands still ends by itself, says where it stood, and leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process_tree import alive, descendants
from tests.servers import PATIENCE, ServerProcess, serve, wait_for

pytestmark = pytest.mark.long

ECHO = ("--engine", "echo")
PROCESS = (*ECHO, "-o", "option.engine_isolation=process")


@contextlib.contextmanager
def crowded(cpu: int, number: int) -> Iterator[None]:
    """A CPU that so many processes want."""
    code = f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile os.getppid() == {os.getpid()}: pass"
    spinning = [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range(number)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


@contextlib.contextmanager
def blocked(kind: str, seconds: float, directory: Path, *arguments: str) -> Iterator[ServerProcess]:
    """A ready server whose loop begins to stand still."""
    file = directory / "block"
    program = ("-m", "tests.process.http.blocking", kind, str(file))
    with serve(*(arguments or ECHO), "-o", f"option.event_loop_timeout={seconds}", program=program) as server:
        server.wait_ready()
        file.touch()
        wait_for(lambda: "the loop stands still" in server.log, PATIENCE, "it goes on")
        yield server


@pytest.mark.parametrize(("kind", "where"), [("sleep", "in sleeping"), ("regex", "in matching"), ("gil", "in holding")])
def test_a_loop_that_stands_still_ends_the_server(kind: str, where: str, tmp_path: Path) -> None:
    with blocked(kind, 1, tmp_path, *PROCESS) as server:
        children = descendants(server.process.pid)
        assert children
        assert server.wait(PATIENCE) == -signal.SIGABRT
        wait_for(lambda: "in main" in server.log, 5, "no stacks are in the log")
        assert "the event loop has been blocked for" in server.log
        assert where in server.log
        wait_for(lambda: not any(map(alive, children)), 10, "processes are left")


@pytest.mark.parametrize("kind", ["sleep", "gil"])
def test_sigterm_ends_a_server_whose_loop_stands_still(kind: str, tmp_path: Path) -> None:
    with blocked(kind, 1000, tmp_path) as server:
        server.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert server.wait(PATIENCE) == -signal.SIGABRT
        assert time.monotonic() - began < 25
        wait_for(lambda: "a stop signal is pending" in server.log, 5, "the log does not say why")


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with blocked("gil", 1000, tmp_path) as server:
        server.send_signal(signal.SIGINT)
        time.sleep(0.1)
        server.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert server.wait(PATIENCE) == -signal.SIGABRT
        assert time.monotonic() - began < 6


def test_a_debugger_may_take_its_time(tmp_path: Path) -> None:
    with blocked("debugger", 1, tmp_path) as server:
        time.sleep(3)
        assert not server.ended
        server.process.kill()
        server.wait(PATIENCE)


def test_a_loop_that_waits_for_a_cpu_is_not_ended(tmp_path: Path) -> None:
    """Four other processes want the server's only CPU: of a second it gets less than a millisecond."""
    everywhere = os.sched_getaffinity(0)
    with crowded(min(everywhere), 4), blocked("cpu", 1, tmp_path) as server:
        time.sleep(4)
        assert not server.ended, server.log
        os.sched_setaffinity(server.process.pid, everywhere)
        os.sched_setscheduler(server.process.pid, os.SCHED_OTHER, os.sched_param(0))
        wait_for(lambda: server.ping() == 200, PATIENCE, "it does not go on")
        assert server.stop() == 0


def test_a_process_that_is_stopped_is_not_ended() -> None:
    """The server alone, and all of its processes, as of a paused container."""
    with serve(*PROCESS, "-o", "option.event_loop_timeout=1") as server:
        server.wait_ready()
        alone = [server.process.pid]
        for pids in (alone, [*alone, *descendants(server.process.pid)]):
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(3)
            for pid in reversed(pids):
                os.kill(pid, signal.SIGCONT)
            assert server.ping() == 200
            time.sleep(2)
            assert server.ping() == 200
        assert server.stop() == 0


def test_without_the_option_nothing_watches() -> None:
    with serve("--engine", "echo", "-o", "option.event_loop_timeout=0") as server:
        server.wait_ready()
        assert descendants(server.process.pid) == {}
        assert server.stop() == 0
