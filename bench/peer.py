"""Another project's server as a process: a port for it, and its readiness."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from handler.core.errors import ConfigError

_LAST_LINES = 20


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
