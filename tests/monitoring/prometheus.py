"""Debian's Prometheus on loopback: the system's program, or the one of the package, unpacked into the user's cache."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from handler.config.model_files import cache_directory
from tests.servers import free_port, http, wait_for


def programs() -> Path:
    """The directory of prometheus and promtool; unpacked, the package starts no service and needs no root."""
    if (found := shutil.which("prometheus")) is not None:
        return Path(found).parent
    target = cache_directory() / "prometheus"
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            _run("apt-get", "-o", "DPkg::Lock::Timeout=300", "-q", "update", directory=scratch)
            _run("apt-get", "-q", "download", "prometheus", directory=scratch)
            (package,) = Path(scratch).glob("prometheus_*.deb")
            _run("dpkg", "--extract", str(package), "unpacked", directory=scratch)
            (Path(scratch) / "unpacked").rename(target)
    return target / "usr" / "bin"


def _run(*command: str, directory: str) -> None:
    done = subprocess.run(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert not done.returncode, f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout}"


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression selects now; an error of Prometheus fails the test."""
        return self._ask("query", query=expression)

    def query_range(self, expression: str, begin: float, end: float, step: float = 1.0) -> list[dict[str, Any]]:
        """The series of an expression from `begin` to `end` (seconds since 1970)."""
        return self._ask("query_range", query=expression, start=begin, end=end, step=step)

    def _ask(self, verb: str, **parameters: str | float) -> list[dict[str, Any]]:
        found = http.get(f"{self.url}/api/v1/{verb}", params=parameters).json()
        assert found["status"] == "success", f"{parameters['query']}: {found['error']}"
        return list(found["data"]["result"])


@contextlib.contextmanager
def prometheus(config: Path, directory: Path) -> Iterator[Prometheus]:
    """One that has read `config` and keeps its data in `directory`."""
    port = free_port()
    command = [str(programs() / "prometheus"), f"--config.file={config}", f"--web.listen-address=127.0.0.1:{port}"]
    with (
        (directory / "log").open("w") as log,
        subprocess.Popen([*command, f"--storage.tsdb.path={directory}"], stdout=log, stderr=log) as process,
    ):
        try:
            server = Prometheus(f"http://127.0.0.1:{port}")
            wait_for(lambda: _is_ready(server.url) or process.poll() is not None, 30, "Prometheus does not start")
            assert process.poll() is None, (directory / "log").read_text()
            yield server
        finally:
            process.terminate()


def _is_ready(url: str) -> bool:
    try:
        return http.get(url + "/-/ready").status_code == 200
    except httpx.ConnectError:
        return False
