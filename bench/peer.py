"""Another project's server as a process: a port for it, its start, readiness and end."""

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

from handler.core.errors import ConfigError

_LAST_LINES = 20
_GRACE = 30.0  # seconds


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def wait_ready(process: subprocess.Popen[bytes], url: str, timeout: float, log: Path) -> None:
    """Wait until `/health` answers.

    Args:
        timeout: seconds.
        log: what the process writes.

    Raises:
        ConfigError: the process ended, or is not ready in time; the message has its last lines.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    last = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    raise ConfigError("\n".join([f"the server at {url} did not come up:", *last]))


@contextlib.contextmanager
def started(
    command: Sequence[str], url: str, timeout: float, environment: Mapping[str, str] | None = None
) -> Iterator[int]:
    """Start a server that will listen on `url`; yield its process id when it is ready, and end it with its children.

    Args:
        timeout: seconds for it to load.
        environment: the whole one; None: this process's.

    Raises:
        ConfigError: it does not come up; the message has its last lines.
    """
    with tempfile.TemporaryDirectory(prefix="peer-") as place:
        path = Path(place) / "log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        try:
            wait_ready(process, url, timeout, path)
            yield process.pid
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
