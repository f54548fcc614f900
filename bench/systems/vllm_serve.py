"""vLLM's own OpenAI server with the same options."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from peer import free_port, wait_ready

from handler.bench.client import Target
from handler.engines.base import EngineConfig
from systems import vllm_settings
from systems.apis import MODEL
from systems.served import Served

_GRACE = 30.0  # seconds


@contextlib.contextmanager
def vllm_serve(config: EngineConfig, num_devices: int, kind: type[Target], timeout: float = 600.0) -> Iterator[Served]:
    """Ready on a free loopback port.

    Raises:
        ConfigError: it does not come up within `timeout` seconds; says what it wrote last.
    """
    url = f"http://127.0.0.1:{free_port()}"
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
            wait_ready(process, url, timeout, directory / "log")
            yield Served(url, process.pid, kind, vllm_settings.CORE)
        finally:
            _end(process)


def _command(config: EngineConfig, num_devices: int, url: str) -> list[str]:
    arguments = vllm_settings.keywords(config, num_devices)
    host, port = url.removeprefix("http://").split(":")
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(arguments["model"])]
    return [*command, "--host", host, "--port", port, "--served-model-name", MODEL, *vllm_settings.flags(arguments)]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
