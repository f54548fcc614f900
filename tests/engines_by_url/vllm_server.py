"""vLLM's own server: its API server and two data-parallel engines, without weights; one engine where there is one GPU.

On a CPU all of its processes are forks (tests/vllm_forks.py), and so a start takes four seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import httpx

from tests import process_tree, vllm_forks
from tests.doubles import tiny
from tests.servers import free_port, http, wait_for

MOST_LOGPROBS = 19
"""Of a token; one less than we take."""

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True}  # fmt: skip
ARGUMENTS = (
    *("--host", "127.0.0.1", "--load-format", "dummy", "--hf-overrides", json.dumps(SHAPE), "--dtype", "float32"),
    *("--served-model-name", "model", "--max-model-len", str(tiny.CONTEXT), "--enforce-eager"),
    *(
        "--kv-cache-memory-bytes",
        str(1 << 25),
        "--gpu-memory-utilization",
        "0.15",
        "--max-logprobs",
        str(MOST_LOGPROBS),
    ),
    *("--structured-outputs-config", json.dumps({"backend": "xgrammar", "disable_any_whitespace": True})),
)
ECHOING = ("--logits-processors", "tests.engines_by_url.vllm_echo:Echo", "--logprobs-mode", "processed_logprobs")
ENGINE = "VLLM::EngineCore"
"""How an engine's process is called."""

FREE = tiny.SPECIAL.index("<|end|>")
"""The stop token of a request that is left to the model."""

_END_SECONDS = 10.0  # in which vLLM ends after its engine


class VllmServer:
    """One server at a time, always at the same port. It writes its log to a file of `directory`.

    Args:
        arguments: arguments in addition to `ARGUMENTS`.
    """

    def __init__(self, directory: Path, model: Path, arguments: Sequence[str] = ECHOING) -> None:
        import torch

        self.engines = min(torch.cuda.device_count() or 2, 2)
        self._log = directory / "vllm.log"
        port = free_port()
        sizes = ("--data-parallel-size", str(self.engines), "--port", str(port))
        self._arguments = (*ARGUMENTS, *arguments, "--model", str(model), *sizes)
        self.url = f"http://127.0.0.1:{port}"
        self._process: BaseProcess | None = None

    def start(self) -> None:
        """Return when it can serve."""
        self._process = vllm_forks.start(
            vllm_forks.become, "vllm.entrypoints.launchers.api_server.entry", self._arguments, str(self._log)
        )
        wait_for(self._ready, 280, "vLLM does not serve")

    def kill(self, name: str = "") -> None:
        """SIGKILL its processes, or one that is called so; return when all have ended."""
        assert self._process is not None
        session = self._process.pid
        assert session is not None
        processes = [pid for pid, command in process_tree.in_session(session).items() if command.startswith(name)]
        for pid in processes[: 1 if name else None]:
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _END_SECONDS
        while (left := process_tree.in_session(session)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:  # a fork holds the pipe by whose end a worker would notice that its engine is dead
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not process_tree.in_session(session), 60, "vLLM goes on")
        self._process.join()

    def _ready(self) -> bool:
        assert self._process is not None
        assert self._process.is_alive(), self._log.read_text()
        try:
            return http.get(f"{self.url}/health").status_code == 200
        except httpx.HTTPError:
            return False


def metric(url: str, name: str) -> list[float]:
    """A metric's value for each engine; `name` may have labels."""
    lines = http.get(f"{url}/metrics").text.splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]
