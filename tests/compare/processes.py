"""Starts server processes of other projects, and measures the CPU time of server processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from handler.core.errors import ConfigError

_PROC = Path("/proc")
_LAST_LINES = 20
_GRACE = 30.0  # seconds


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextlib.contextmanager
def started(
    command: Sequence[str], url: str, timeout: float, environment: Mapping[str, str] | None = None
) -> Iterator[int]:
    """Start a server, yield its process ID when it is ready, and stop it and its children at the end.

    Args:
        command: the command that starts the server.
        url: the URL at which the server will listen.
        timeout: number of seconds within which `/health` must respond.
        environment: the complete environment, or None for that of this process.

    Raises:
        ConfigError: the server does not start. The message contains its last lines of output.
    """
    with tempfile.TemporaryDirectory(prefix="peer-") as directory:
        log = Path(directory) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        try:
            _wait_ready(process, url, timeout, log)
            yield process.pid
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], url: str, timeout: float, log: Path) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    last = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    raise ConfigError("\n".join([f"the server at {url} did not start:", *last]))


class Cpu(NamedTuple):
    """The CPU seconds of a server, separately for the engine processes and for all other processes (the host)."""

    host: float
    engine: float

    def since(self, before: Cpu) -> Cpu:
        return Cpu(self.host - before.host, self.engine - before.engine)


def cpu_seconds(pid: int, engine: tuple[bytes, ...] = ()) -> Cpu:
    """Return the CPU seconds of a process and its descendants. Descendants that end during the call are not counted.

    Args:
        pid: the ID of the process.
        engine: prefixes of the names of the engine processes. Their descendants also count as engine processes.

    Raises:
        OSError: the process has ended.
    """
    return _cpu_seconds(pid, engine, process_seconds(pid), inside=False)


def _cpu_seconds(pid: int, engine: tuple[bytes, ...], own: float, *, inside: bool) -> Cpu:
    inside = inside or _command(pid).startswith(engine or (b"\n",))
    host, core = (0.0, own) if inside else (own, 0.0)
    for child in children(pid):
        with contextlib.suppress(OSError):
            seconds = _cpu_seconds(child, engine, process_seconds(child), inside=inside)
            host, core = host + seconds.host, core + seconds.engine
    return Cpu(host, core)


def process_seconds(pid: int) -> float:
    """Return the user and system time of a process in seconds, including threads that have ended.

    The kernel has a clock for each process. The clock ID is computed as in clock_getcpuclockid(3).
    """
    return time.clock_gettime(~pid << 3 | 2)


def _command(pid: int) -> bytes:
    """Return the title that a process has set for itself, or else its command."""
    return (_PROC / str(pid) / "cmdline").read_bytes()


def child_by_command(pid: int, part: bytes) -> int:
    """Return the only descendant of `pid` whose command contains `part`."""
    (child_pid,) = (child for child in descendants(pid) if part in _command(child))
    return child_pid


def descendants(pid: int) -> Iterator[int]:
    """Yield the IDs of all running descendants of `pid`."""
    for child in children(pid):
        yield child
        yield from descendants(child)


def children(pid: int) -> list[int]:
    """Return the IDs of all running children of `pid`. The list is empty if `pid` has ended."""
    while True:
        try:
            threads = list((_PROC / str(pid) / "task").iterdir())
        except (FileNotFoundError, ProcessLookupError):
            return []
        started = [_started_by(thread) for thread in threads]
        if None not in started:  # if a thread has ended, its children now belong to another, so all are read again
            return [child for some in started for child in some or ()]


def _started_by(thread: Path) -> list[int] | None:
    """Return the IDs of the processes that a thread has started, or None if the thread has ended."""
    try:
        return [int(child) for child in (thread / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        if thread.exists():  # a kernel without CONFIG_PROC_CHILDREN
            raise
        return None
