"""Dynamo's front end with its KV router, and workers, as processes on this machine; no etcd, no NATS."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.ports import free_port
from tests.servers import http, wait_for

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-dynamo" / "bin" / "python"


class Cluster:
    """`workers` run; the files of `directory` are theirs and what they write."""

    def __init__(self, directory: Path, model: Path) -> None:
        self._directory = directory
        self._model = model
        self._environment = {
            **os.environ,
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(directory / "discovery"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
        }
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}/v1"
        self.workers: list[subprocess.Popen[bytes]] = []
        self._started = 0
        self._front: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._front = self._run(
            "front", "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(self._port),
            "--router-mode", "kv", "--migration-limit", "3",
        )  # fmt: skip

    def add_worker(self) -> None:
        """Start one, and wait until the front end has a model."""
        self._started += 1
        name = f"worker-{self._started}"
        self.workers.append(self._run(name, str(Path(__file__).with_name("worker.py")), str(self._model)))
        wait_for(self.ready, 30, "Dynamo has no model")

    def kill_worker(self) -> None:
        worker = self.workers.pop(0)
        worker.send_signal(signal.SIGKILL)
        worker.wait()

    def ready(self) -> bool:
        try:
            return bool(http.get(f"{self.url}/models").json()["data"])
        except (httpx.HTTPError, ValueError):
            return False

    def said(self, line: str) -> int:
        """How often workers have written a line."""
        texts = [path.read_text().splitlines() for path in self._directory.glob("worker-*.log")]
        return sum(text.count(line) for text in texts)

    def stop(self) -> None:
        for process in (*self.workers, *([self._front] if self._front else [])):
            process.kill()
            process.wait()

    def _run(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._directory / f"{name}.log").open("wb") as log:
            return subprocess.Popen([PYTHON, *arguments], env=self._environment, stdout=log, stderr=subprocess.STDOUT)


@contextlib.contextmanager
def cluster(directory: Path, model: Path, workers: int = 2) -> Iterator[Cluster]:
    found = Cluster(directory, model)
    try:
        found.start()
        for _ in range(workers):
            found.add_worker()
        yield found
    finally:
        found.stop()
