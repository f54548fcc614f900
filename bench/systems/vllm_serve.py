"""vLLM's own OpenAI server with the same options."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from peer import free_port, started

from handler.engines.base import EngineConfig
from proof.bench.client import Target
from systems import vllm_settings
from systems.apis import MODEL
from systems.served import Served


@contextlib.contextmanager
def vllm_serve(config: EngineConfig, num_devices: int, kind: type[Target], timeout: float = 600.0) -> Iterator[Served]:
    """Ready on a free loopback port.

    Raises:
        ConfigError: it does not come up within `timeout` seconds; says what it wrote last.
    """
    url = f"http://127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="vllm-serve-") as place:
        environment = vllm_settings.environment(config)
        if vllm_settings.named_vllm(Path(place)):
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (place, environment.get("PYTHONPATH"))))
        with started(_command(config, num_devices, url), url, timeout, environment) as pid:
            yield Served(url, pid, kind, vllm_settings.CORE)


def _command(config: EngineConfig, num_devices: int, url: str) -> list[str]:
    arguments = vllm_settings.keywords(config, num_devices)
    host, port = url.removeprefix("http://").split(":")
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(arguments["model"])]
    return [*command, "--host", host, "--port", port, "--served-model-name", MODEL, *vllm_settings.flags(arguments)]
