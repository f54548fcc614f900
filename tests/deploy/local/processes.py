"""`lmi deploy local` as a process of its own, on a free port."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tests.environment import clean_environment
from tests.servers import PATIENCE, wait_for


class LocalProcess:
    """What it has written so far is in `out` (standard output) and `log` (standard error)."""

    def __init__(self, *arguments: str, directory: Path | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deploy", "local", "--port", "0", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment(), cwd=directory,
        )  # fmt: skip
        self._lines: dict[str, list[str]] = {"out": [], "log": []}
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._pipes = {"out": self.process.stdout, "log": self.process.stderr}
        self._readers = [
            threading.Thread(target=self._read, args=(name, pipe), daemon=True) for name, pipe in self._pipes.items()
        ]
        for reader in self._readers:
            reader.start()

    @property
    def out(self) -> str:
        return "".join(self._lines["out"])

    @property
    def log(self) -> str:
        return "".join(self._lines["log"])

    @property
    def url(self) -> str:
        found = re.search(r"InService: (http://\S+)", self.out)
        assert found is not None, self.log
        return found[1]

    def container_pid(self) -> int:
        children = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True)
        return int(children.stdout.split()[0])

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.log
            return "Body=" in self.out

        wait_for(ready, PATIENCE, "the endpoint is not in service")

    def wait_said(self, text: str) -> None:
        wait_for(lambda: text in self.log, PATIENCE, f"it does not say {text!r}")

    def end(self, number: int = signal.SIGINT) -> int:
        """A signal, and the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        self.process.wait(PATIENCE)
        for reader in self._readers:
            reader.join(PATIENCE)
        for pipe in self._pipes.values():
            pipe.close()
        return self.process.returncode

    def _read(self, name: str, pipe: IO[str]) -> None:
        for line in pipe:
            self._lines[name].append(line)


@contextlib.contextmanager
def local_process(*arguments: str, directory: Path | None = None) -> Iterator[LocalProcess]:
    """In service.

    Args:
        directory: where it runs, if not here.
    """
    local = LocalProcess(*arguments, directory=directory)
    try:
        local.wait_ready()
        yield local
    finally:
        local.end()


def aws_variables(url: str) -> dict[str, str]:
    """What a script needs to take it for AWS."""
    return {
        "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": url,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "ENDPOINT_NAME": "local",
    }
