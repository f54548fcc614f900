"""Runs `lmi serve` on a thread of this process: the real server and real sockets on loopback, but no process."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from unittest import mock

import pytest

from handler import cli
from handler.core import child_processes, loop
from handler.http import inference
from handler.http import server as http_server
from tests.environment import clean_environment
from tests.process_tree import descendants
from tests.servers import LiveServer, cores_for

_starting = threading.Lock()
_threads: set[int] = set()
"""Those of servers that run, by their identifiers."""


class AppServer(LiveServer):
    """One server on a thread. `log` is what it has written so far, log records included."""

    def __init__(self) -> None:
        super().__init__()
        self.status: int | None = None
        self._signals = _Signals()
        self._handler = _Handler(self.lines)
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    def start(self, arguments: tuple[str, ...], environment: Mapping[str, str], seconds: float) -> None:
        """Return when the server is ready.

        Raises:
            AssertionError: it could not start; the message holds its log.
        """
        self._arguments = ["serve", "--port", "0", *arguments]
        self._others = _engines()
        root = logging.getLogger()
        root.addHandler(self._handler)
        root.setLevel(environment.get("LMI_LOG_LEVEL", "INFO").upper())  # basicConfig leaves a root with handlers alone
        with (
            _starting,  # what follows belongs to the whole process
            mock.patch.dict(os.environ, environment, clear=True),
            mock.patch.object(loop, "StopSignals", return_value=self._signals),
            mock.patch.object(loop, "keep_collecting"),
            mock.patch.object(loop, "importing", contextlib.nullcontext),
            contextlib.redirect_stderr(_Lines(self.lines)),
            cores_for(arguments),
        ):
            self._thread.start()
            self.wait_listening(seconds)

    @property
    def ended(self) -> bool:
        return self._thread.ident is not None and not self._thread.is_alive()

    def engine_pid(self) -> int:
        """The engine process, where it has one."""
        (pid,) = self.engine_pids()
        return pid

    def engine_pids(self) -> set[int]:
        """The engine processes that there are now, as while one is started in another's place."""
        return _engines() - self._others

    def send_signal(self, number: signal.Signals) -> None:
        self._signals.receive(number)

    def wait(self, seconds: float) -> int:
        self._thread.join(seconds)
        assert self.status is not None, f"the server has not ended after {seconds} s"
        return self.status

    def stop(self) -> int:
        if not self.ended:
            self.send_signal(signal.SIGTERM)
        try:
            return self.wait(35)
        finally:
            root = logging.getLogger()
            root.removeHandler(self._handler)
            if not any(isinstance(handler, _Handler) for handler in root.handlers):
                root.setLevel(logging.WARNING)  # as before the first server, for tests that look at the log
            sys.modules.pop("model", None)  # a model.py, which another server would take for its own name
            child_processes._stopped = False  # set by a server that ends while it loads, for the whole process

    def _run(self) -> None:
        _threads.add(self._handler.begin())
        try:
            self.status = cli.main(self._arguments)
        except SystemExit as ended:  # argparse does so
            self.status = int(ended.code or 0)
        except Exception:
            self.status = 1
            self.lines.append(traceback.format_exc())
        finally:
            _threads.discard(threading.get_ident())


def _engines() -> set[int]:
    return {pid for pid, command in descendants(os.getpid()).items() if "engine_process" in command}


class _Signals(loop.StopSignals):
    """The process's own handlers stay; a test sends what the server is to hear."""

    def install(self) -> None:
        pass

    def receive(self, number: signal.Signals) -> None:
        self._handle(number, None)


class _Handler(logging.Handler):
    """Takes a server's records, and those of threads that belong to no server: its helpers' among them."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines
        self._thread: int | None = None
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))

    def begin(self) -> int:
        self._thread = threading.get_ident()
        return self._thread

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread or record.thread not in _threads:
            self._lines.append(self.format(record) + "\n")


class _Lines(io.TextIOBase):
    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def write(self, text: str) -> int:
        self._lines.append(text)
        return len(text)


BY_KEY = ("-o", "option.owner_header=authorization")
"""What makes the keys in requests owners, as if a gateway had checked them."""


@contextlib.contextmanager
def serve(*arguments: str, env: Mapping[str, str] | None = None, seconds: float = 60) -> Iterator[AppServer]:
    """A server on a free port, ready.

    Args:
        arguments: those of `lmi serve`.
    """
    server = AppServer()
    try:
        server.start(arguments, {**clean_environment(), **(env or {})}, seconds)
        yield server
    finally:
        server.stop()


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run_to_end(*arguments: str, env: Mapping[str, str] | None = None) -> Ended:
    """What `lmi serve` prints that ends by itself, as after `--check`."""
    server, printed = AppServer(), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), pytest.raises(AssertionError, match="the server ended"):
            server.start(arguments, {**clean_environment(), **(env or {})}, 60)
        return Ended(server.stop(), printed.getvalue(), server.log)
    finally:
        server.stop()


def refused_start(*arguments: str) -> str:
    """What `lmi serve` says, which ends with status 2."""
    server = AppServer()
    try:
        with pytest.raises(AssertionError, match="the server ended"):
            server.start(arguments, clean_environment(), 60)
        assert server.stop() == 2
    finally:
        server.stop()
    assert "Traceback" not in server.log
    return server.log


@contextlib.contextmanager
def impatient(*arguments: str, keep_alive: float = 0.2) -> Iterator[AppServer]:
    """An echo server whose streams say after so many seconds of silence that they are there."""
    with mock.patch.object(inference, "KEEP_ALIVE", keep_alive), serve("--engine", "echo", *arguments) as server:
        yield server


@contextlib.contextmanager
def short_drain(seconds: float) -> Iterator[None]:
    """Servers give up after so many seconds what is under way when they are told to stop."""
    with mock.patch.object(http_server, "DRAIN", seconds):
        yield
