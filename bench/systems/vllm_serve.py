"""vLLM's own OpenAI server with the same options."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from handler.bench.client import Target
from handler.core.errors import ConfigError
from handler.engines.base import EngineConfig
from systems import vllm_settings
from systems.apis import MODEL
from systems.served import Served

_GRACE = 30.0  # seconds
_LAST_LINES = 20


@contextlib.contextmanager
def vllm_serve(config: EngineConfig, num_devices: int, kind: type[Target], timeout: float = 600.0) -> Iterator[Served]:
    """Ready on a free loopback port.

    Raises:
        ConfigError: it does not come up within `timeout` seconds; says what it wrote last.
    """
    url = f"http://127.0.0.1:{_free_port()}"
    with tempfile.TemporaryDirectory(prefix="vllm-serve-") as place:
        directory = Path(place)
        environment = vllm_settings.environment(config)
        if vllm_settings.named_vllm(directory):
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (place, environment.get("PYTHONPATH"))))
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(
                _command(config, num_devices, url),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # so that all that it starts can be ended with it
            )
        try:
            _wait_ready(process, url, timeout, directory / "log")
            yield Served(url, process.pid, kind, vllm_settings.CORE)
        finally:
            _end(process)


def _command(config: EngineConfig, num_devices: int, url: str) -> list[str]:
    arguments = vllm_settings.keywords(config, num_devices)
    host, port = url.removeprefix("http://").split(":")
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(arguments["model"])]
    return [*command, "--host", host, "--port", port, "--served-model-name", MODEL, *vllm_settings.flags(arguments)]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _wait_ready(process: subprocess.Popen[bytes], url: str, timeout: float, log: Path) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    last = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    raise ConfigError("\n".join(["`vllm serve` did not come up:", *last]))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
