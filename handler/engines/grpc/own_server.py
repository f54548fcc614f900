"""A server that the engine starts itself, by the Python of another environment, and that ends with the engine."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from handler.config.config import Config
from handler.engines.grpc.contract import Contract
from handler.engines.process.supervisor import end_with_process, end_with_this_process

_HOST = "127.0.0.1"
_END_SECONDS = 5.0  # in which it frees what it has


class OwnServer:
    """A server on a free port of this machine's loopback. When it ends by itself, the engine's process ends too.

    The engine's supervisor then starts both again.

    Args:
        command: of the server, without its port.
    """

    def __init__(self, command: Sequence[str]) -> None:
        with socket.create_server((_HOST, 0)) as free:
            port = free.getsockname()[1]
        self.url = f"grpc://{_HOST}:{port}"
        self._command = [*command, "--host", _HOST, "--port", str(port)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it.

        Raises:
            OSError: the Python cannot be run.
        """
        end_with_this_process()
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # modules of the working directory are none of its own
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, env=environment)
        self._stop_watch = end_with_process(self._process.pid, shlex.join(self._command))

    def stop(self) -> None:
        if self._process is None:
            return
        self._stop_watch()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._process.kill()
        self._process.wait()


def command(contract: Contract, model: Path, config: Config) -> list[str]:
    """Return the command of option.engine_python's server; `option.engine_flags` come last, and win."""
    options = config.engine_options
    words = [options["engine_python"], "-m", *contract.command, str(model)]
    if config.max_model_len:
        words += [contract.context_flag, str(config.max_model_len)]
    if options.get("trust_remote_code"):
        words.append("--trust-remote-code")
    return [*words, *options.get("engine_flags", ())]
