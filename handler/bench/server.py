"""Start servers to measure, each in a process of its own on a free loopback port."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from handler.core.errors import ConfigError

_LISTENING = re.compile(r"listening on (https?://[^\s;]+)")
_SERVE = """
import signal
from handler.core.child_processes import die_with_parent
die_with_parent(signal.SIGTERM)
from handler.cli import main
raise SystemExit(main())
"""  # SIGTERM, as at the end of a measurement: the server ends its engine's processes itself
_GRACE = 35.0  # seconds: draining takes up to 20, and exiting some more


class Server(NamedTuple):
    url: str
    pid: int


@contextlib.contextmanager
def lmi_serve(
    arguments: Sequence[str], *, timeout: float = 300.0, variables: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Start `lmi serve` on a free port, and yield it when it is ready. It ends as well when this process is killed.

    Args:
        arguments: those of `lmi serve`, without the port.
        timeout: seconds for the engine to load.
        variables: of the environment, beside this process's own.

    Raises:
        ConfigError: it does not start; the message has its last lines.
    """
    command = [sys.executable, "-c", _SERVE, "serve", *arguments, "--port", "0"]
    with process(command, timeout=timeout, variables=variables) as server:
        yield server


@contextlib.contextmanager
def process(
    command: Sequence[str], *, timeout: float = 30.0, variables: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Start a server process that writes `listening on URL` to stderr when it is ready."""
    environment = {**os.environ, **(variables or {})}
    running = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    output = _Output(running)
    try:
        yield Server(output.url(timeout), running.pid)
    finally:
        running.terminate()
        try:
            running.wait(_GRACE)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
        output.close()


class _Output:
    """Reads the process's output at all times, as a full pipe would stop the process."""

    def __init__(self, running: subprocess.Popen[str]) -> None:
        self._running = running
        self._last: deque[str] = deque(maxlen=20)
        self._url = ""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def url(self, timeout: float) -> str:
        deadline = time.monotonic() + timeout
        while not self._url:
            if self._running.poll() is not None or time.monotonic() > deadline:
                raise ConfigError(f"the server to be measured did not come up:\n{''.join(self._last).rstrip()}")
            time.sleep(0.02)
        return self._url

    def close(self) -> None:
        self._thread.join()
        assert self._running.stderr is not None
        self._running.stderr.close()

    def _read(self) -> None:
        assert self._running.stderr is not None
        for line in self._running.stderr:
            self._last.append(line)
            if found := _LISTENING.search(line):
                self._url = found[1]
