"""A server that an engine starts on a free loopback port. It exits when the engine does."""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TextIO

from handler.config.environment import secrets as keys
from handler.core.child_processes import Child
from handler.core.terminal import escaped
from handler.engines.process.output import ChildOutput, LastError
from handler.engines.process.supervisor import (
    descendants,
    end_with_process,
    end_with_this_process,
    open_process,
    processes_with,
)
from handler.engines.remote.servers import Lost, Silent

LOOPBACK = "127.0.0.1"
_END_SECONDS = 1.5  # for the server to free its resources; the supervisor gives the engine 2 s
_GRACE = 5.0  # seconds for the engine to report the end of its server and to end
_TCP = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_CLOSING = 0.5  # seconds in which a server that ends gives up its port
_CLOSING_INTERVAL = 0.01
_LAST_LINES = 1.0  # seconds to read what a server wrote before it ended
MARKER = "LMI_ENGINE_MARKER"
"""The variable whose value all processes of a server have in common, whatever session they begin."""
_MOST_LINES = 1000  # lines of a server in the log per period; more would fill disks, and hide all other lines
_PERIOD = 10.0  # seconds


class OwnServer:
    """A server that the engine starts on a free loopback port. It exits when the engine does.

    Args:
        scheme: scheme of the server's address.
        name: name of the server in the log. The command is not logged, because its flags may contain secrets.
        command: command that starts the server, without the port.
        environment: environment of the server.
        output: chooses the lines of the server's output to log, on a thread, and keeps the error that may end the
            server. By default, all lines are logged.

    Attributes:
        end: file descriptor that becomes readable when the server ends; None before `watch`, or if the system cannot
            watch processes.
    """

    def __init__(
        self,
        scheme: str,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: LastError | None = None,
    ) -> None:
        with socket.create_server((LOOPBACK, 0)) as free:
            self._port = free.getsockname()[1]
        self.url = f"{scheme}://{LOOPBACK}:{self._port}"
        self._name = name
        self._command = [*command, "--host", LOOPBACK, "--port", str(self._port)]
        self._environment = environment
        self._marker = secrets.token_hex(16)
        self._output = LastError(*keys()) if output is None else output
        self._process: Child | None = None
        self._reader: ServerOutput | None = None
        self._stop_watch: Callable[[], None] = lambda: None
        self.end: int | None = None

    def start(self) -> None:
        """Start the server.

        Raises:
            OSError: the program cannot be run.
        """
        end_with_this_process(self._marker)
        with _default_signals():
            self._process = Child(
                self._command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd="/",
                env={**self._environment, MARKER: self._marker},
            )
        assert self._process.stdout is not None
        self._reader = ServerOutput(self._process.stdout, self._output.read, LineWriter(self._name))

    def watch(self) -> None:
        """End this process when the server exits by itself. The engine's supervisor then restarts both.

        The engine should report the end itself before that.
        """
        assert self._process is not None
        with suppress(ProcessLookupError):  # cannot happen: its status has not been read
            self.end = open_process(self._process.pid)
        self._stop_watch = end_with_process(self._process.pid, self._name, _GRACE)

    @property
    def exit_status(self) -> int | None:
        """The exit status of the server, or the negative number of the signal that ended it; None while it runs."""
        if self._process is None or self._process.poll() is None:
            return None
        if self._reader is not None:
            self._reader.read(_LAST_LINES)
        return self._process.returncode

    def failure(self) -> str:
        """Return how the server has ended, as a verb phrase, with the reason; "" while it runs."""
        status = self.exit_status
        if status is None:
            return ""
        if status == -signal.SIGKILL:
            return "was killed, perhaps because the machine has too little memory"
        ended = f"ended by signal {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"{ended}: {reason}" if (reason := self._output.error) else ended

    def check_port(self) -> None:
        """Check that no other process listens on the port, because gRPC servers can share a port.

        This must be called before each connection. A server that ends just now lists its files no longer, but still
        has its port, so a stranger is one that stays while the server runs.

        Raises:
            Failed: another process listens on the port, or the server is not listening yet, or has ended.
        """
        if self._process is None or not _TCP[0].exists():  # not on Linux
            return
        until = time.monotonic() + _CLOSING
        while listeners := _listeners(self._port):
            if not listeners - _opened(self._pids()):
                return
            if failure := self.failure():
                raise Lost(failure)
            if time.monotonic() >= until:
                raise Lost("shares its port", "another process listens on it too")
            time.sleep(_CLOSING_INTERVAL)
        raise Silent("cannot be reached", "it accepts no connections")

    def listens(self) -> bool:
        """Return whether the server itself listens on its port, as far as the system tells."""
        if self._process is None or not _TCP[0].exists():
            return self._process is not None
        return bool(_listeners(self._port) & _opened(self._pids()))

    def _pids(self) -> list[int]:
        assert self._process is not None
        return [self._process.pid, *descendants(self._process.pid)]

    def stop(self) -> None:
        if self._process is None:
            return
        self._stop_watch()
        # A script may have started the server in another session, or may have left it without a parent.
        # Once it has ended, its id may be that of another process.
        below = descendants(self._process.pid) if self._process.status() is None else ()
        others = {*below, *processes_with(self._marker)} if _TCP[0].exists() else ()
        opened = _open_all(others)
        self._process.end(_END_SECONDS, signal.SIGTERM)
        _kill_all(opened)
        if self.end is not None:
            os.close(self.end)
            self.end = None
        if self._reader is not None:
            self._reader.read(_LAST_LINES)


def _open_all(pids: Iterable[int]) -> list[int]:
    """Open file descriptors that refer to processes, as far as the system allows this."""
    descriptors = []
    for pid in pids:
        with suppress(OSError):
            descriptors.append(os.pidfd_open(pid))
    return descriptors


def _kill_all(processes: Iterable[int]) -> None:
    """Kill the processes that still run, and close their file descriptors.

    The program may be a script that has started the server, perhaps in another session, and that ended before it.
    """
    for fd in processes:
        with suppress(OSError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        os.close(fd)


class LineWriter:
    """Writes lines to standard error, but at most `_MOST_LINES` per `_PERIOD`. One line tells how many were omitted.

    Lines are also omitted while nobody reads standard error. Otherwise, the server would wait for that too.

    Args:
        name: name of the server.

    Attributes:
        num_omitted: number of omitted lines that were not reported yet.
    """

    def __init__(self, name: str) -> None:
        self.num_omitted = 0
        self._name = name
        self._began = time.monotonic()
        self._num_written = 0

    @property
    def seconds_left(self) -> float:
        """Number of seconds until the end of this period."""
        return max(self._began + _PERIOD - time.monotonic(), 0.0)

    def write(self, line: str) -> None:
        """Write a line, or omit it."""
        if not self.seconds_left:
            self.end_period()
        if self._num_written < _MOST_LINES and _accepts_line(sys.stderr):
            self._num_written += 1
            _print(line)
        else:
            self.num_omitted += 1

    def end_period(self) -> None:
        """Write how many lines were omitted, and begin the next period."""
        if self.num_omitted and _accepts_line(sys.stderr):
            _print(f"WARNING {self._name}: {self.num_omitted} lines were omitted, because there were too many")
            self.num_omitted = 0
        self._began = time.monotonic()
        self._num_written = 0


def _accepts_line(stream: TextIO) -> bool:
    """Return whether a short line can be written to a stream without waiting."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), select.POLLOUT)
        return bool(poll.poll(0))
    except (OSError, ValueError):  # no file descriptor
        return True


def _print(line: str) -> None:
    with suppress(OSError, ValueError):  # nobody will ever read it; the server's output must be read nevertheless
        print(escaped(line), file=sys.stderr, flush=True)


class ServerOutput(ChildOutput):
    """The output of a server and its children. Its lines are logged.

    Args:
        read_line: returns a line as it should be logged, or "".
    """

    def __init__(self, output: IO[bytes], read_line: Callable[[str], str], writer: LineWriter) -> None:
        self._read_line, self._writer = read_line, writer
        super().__init__(output)

    def take(self, pipe: int, data: bytes, lines: list[str]) -> None:
        for line in lines:
            if logged := self._read_line(line):
                self._writer.write(logged)
        if not data:  # it is silent or has ended: tell how many lines were omitted
            self._writer.end_period()

    def patience(self) -> float | None:
        return self._writer.seconds_left if self._writer.num_omitted else None


@contextmanager
def _default_signals() -> Iterator[None]:
    """Make child processes started in this context end on SIGINT and SIGTERM, which this process ignores."""
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _listeners(port: int) -> set[str]:
    """Return the sockets that listen on a port, by their names in Linux's /proc/PID/fd."""
    rows = [line.split() for table in _TCP if table.exists() for line in table.read_text().splitlines()[1:]]
    return {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")}


def _opened(pids: Iterable[int]) -> set[str]:
    """Return the names of all files that the processes have open."""
    links = set()
    for pid in pids:
        with suppress(OSError):  # it has just ended
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    links.add(os.readlink(link))
    return links
