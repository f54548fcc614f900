"""The entry point as a real process, run as SageMaker runs it, on loopback."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.environment import clean_environment
from tests.servers import free_port, http, wait_for


class Container:
    """`python -m handler.container serve`; `log` is what it and its server have written."""

    def __init__(self, port: int, environment: Mapping[str, str]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "handler.container", "serve"],
            env={**clean_environment(), "SAGEMAKER_BIND_TO_PORT": str(port), "LMI_HOST": "127.0.0.1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def wait_ready(self, seconds: float) -> None:
        wait_for(self._ready, seconds, "the container is not ready")

    def _ready(self) -> bool:
        assert self.process.poll() is None, self.log
        try:
            return http.get(self.url + "/ping", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def wait_ended(self, seconds: float) -> int:
        status = self.process.wait(seconds)
        self._reader.join(5)
        return status

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)


@contextmanager
def container(scratch: Path, environment: Mapping[str, str]) -> Iterator[Container]:
    """`scratch` holds SageMaker's directories and the one to write in."""
    places = {"SAGEMAKER_MODEL_PATH": str(scratch / "ml" / "model"), "LMI_SCRATCH": str(scratch / "scratch")}
    found = Container(free_port(), {**places, **environment})
    try:
        yield found
    finally:
        if found.process.poll() is None:
            found.process.send_signal(signal.SIGTERM)
            found.process.wait(35)
        found.wait_ended(5)
        assert found.process.stdout is not None
        found.process.stdout.close()


def model_data(scratch: Path, properties: str) -> Path:
    """SageMaker's model directory, with a serving.properties alone in it."""
    directory = scratch / "ml" / "model"
    directory.mkdir(parents=True)
    (directory / "serving.properties").write_text(properties)
    return directory
