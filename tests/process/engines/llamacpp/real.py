"""A real llama-server on loopback, from LLAMA_SERVER or PATH, for the tests that its double passes too."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.checkpoints.byte_gguf import CONTEXT, EOS
from tests.ports import free_port
from tests.servers import wait_for

PROGRAM = shutil.which(os.environ.get("LLAMA_SERVER", "llama-server"))
EXACT = ("--ctx-checkpoints", "0")
"""A flag without which llama.cpp b11434 mixes the states of prompts that begin alike.

It concerns models with sliding windows or with states in place of a cache. llama-server then restores a checkpoint that
may contain one token of another prompt (`cur.pos_max > pos_next` in tools/server/server-context.cpp).
"""


class RealServer:
    """A running llama-server.

    Attributes:
        pieces: the bytes of each token.
        eog: ids that end an answer.
    """

    eog = frozenset({EOS})

    def __init__(self, port: int, pieces: Sequence[bytes]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.pieces = pieces

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}") as answer:
            return json.load(answer)

    @property
    def num_busy(self) -> int:
        return sum(slot["is_processing"] for slot in self.get("/slots"))

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.get("/health")["status"] == "ok")
        return False


@contextlib.contextmanager
def running(file: Path, pieces: Sequence[bytes], num_slots: int = 4, *flags: str) -> Iterator[RealServer]:
    """A llama-server with this model."""
    assert PROGRAM is not None
    port = free_port()
    command = [PROGRAM, "-m", str(file), "--host", "127.0.0.1", "--port", str(port), "-t", "1", "--offline"]
    sizes = ["-np", str(num_slots), "-c", str(num_slots * CONTEXT)]
    with (file.parent / "llama-server.log").open("wb") as log:
        process = subprocess.Popen([*command, *sizes, *flags], stdout=log, stderr=log)
    try:
        server = RealServer(port, pieces)
        wait_for(lambda: process.poll() is not None or server.is_ready(), 60, "llama-server is not ready")
        assert process.poll() is None, (file.parent / "llama-server.log").read_text()[-2000:]
        yield server
    finally:
        process.kill()
        process.wait()
