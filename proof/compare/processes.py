"""Other projects' servers as processes, and the CPU time that a server's processes take."""

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
    """Start a server that will listen on `url`; yield its process id when it is ready, and end it with its children.

    Args:
        timeout: seconds until `/health` must answer.
        environment: the complete environment; None: this process's.

    Raises:
        ConfigError: it does not start; the message has its last lines.
    """
    with tempfile.TemporaryDirectory(prefix="peer-") as place:
        log = Path(place) / "log"
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
    """CPU seconds of a server: of the engine's processes with their children, and of all others (the host)."""

    host: float
    engine: float

    def since(self, before: Cpu) -> Cpu:
        return Cpu(self.host - before.host, self.engine - before.engine)


def cpu_seconds(pid: int, engine: tuple[bytes, ...] = ()) -> Cpu:
    """Return the CPU seconds of `pid` and its descendants, except those that end meanwhile.

    Args:
        engine: beginnings of the names of the engine's processes; none: it has no process of its own.

    Raises:
        OSError: `pid` has ended.
    """
    return _cpu_seconds(pid, engine, process_seconds(pid), inside=False)


def _cpu_seconds(pid: int, engine: tuple[bytes, ...], own: float, *, inside: bool) -> Cpu:
    inside = inside or _command(pid).startswith(engine or (b"\n",))
    host, core = (0.0, own) if inside else (own, 0.0)
    for child in children(pid):
        with contextlib.suppress(OSError):
            found = _cpu_seconds(child, engine, process_seconds(child), inside=inside)
            host, core = host + found.host, core + found.engine
    return Cpu(host, core)


def process_seconds(pid: int) -> float:
    """Return user and system time of all threads of one process, including ended ones, to the nanosecond.

    Uses the kernel's clock of that process, numbered as clock_getcpuclockid(3) does.
    """
    return time.clock_gettime(~pid << 3 | 2)


def _command(pid: int) -> bytes:
    """Return a process's own title, otherwise its command."""
    return (_PROC / str(pid) / "cmdline").read_bytes()


def child_by_command(pid: int, part: bytes) -> int:
    """Return the only descendant of `pid` whose command contains `part`."""
    (found,) = (child for child in descendants(pid) if part in _command(child))
    return found


def descendants(pid: int) -> Iterator[int]:
    """Yield the ids of all running descendants of `pid`."""
    for child in children(pid):
        yield child
        yield from descendants(child)


def children(pid: int) -> list[int]:
    """Return the ids of all running children of `pid`; none if it has ended."""
    while True:
        try:
            threads = list((_PROC / str(pid) / "task").iterdir())
        except (FileNotFoundError, ProcessLookupError):
            return []
        found = [_started_by(thread) for thread in threads]
        if None not in found:  # else what that one started is another's now, perhaps one's that was read before
            return [child for some in found for child in some or ()]


def _started_by(thread: Path) -> list[int] | None:
    """Return the ids of the processes that a thread started; None if it has ended."""
    try:
        return [int(child) for child in (thread / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        if thread.exists():  # a kernel without CONFIG_PROC_CHILDREN
            raise
        return None
