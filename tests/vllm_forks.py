"""vLLM's processes as forks of one that has imported it, which takes each of them nine seconds otherwise.

An engine has three on a CPU: its own, its core and its worker. As forks it has two, as on one GPU: the core would spin
while the worker computes. Where there is a GPU they are real ones.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from handler.core import child_processes
from handler.core.child_processes import Child, die_with_parent
from tests.environment import clean_environment
from tests.servers import free_port, wait_for

_MODELS = ("bert", "llama", "llava", "qwen2_audio", "qwen2_vl", "whisper")
_GRPC = "vllm.entrypoints.launchers.grpc_server"
_PRELOADED = (
    *("handler.engines.process.engine_process", "handler.engines.process.sandbox", "handler.engines.vllm.engine"),
    *("vllm.entrypoints.openai.api_server", "vllm.v1.engine.async_llm", "vllm.v1.engine.llm_engine"),
    *(_GRPC, "vllm.v1.worker.cpu_worker"),
    *(f"vllm.model_executor.models.{name}" for name in _MODELS),
)
_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}


def start(target: Callable[..., object], *arguments: Any) -> BaseProcess:
    """Start a process that has imported vLLM already."""
    forkserver.set_forkserver_preload([*_PRELOADED])
    with mock.patch.dict(os.environ, {**clean_environment(), **_ENVIRONMENT}, clear=True):
        forkserver.ensure_running()
    process = multiprocessing.get_context("forkserver").Process(target=_run, args=(target, arguments))
    process.start()
    return process


def _run(target: Callable[..., object], arguments: Sequence[Any]) -> None:
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    os.setsid()
    if current_platform.is_cpu():  # vLLM would start new interpreters
        multiprocessing.get_context = mock.Mock(return_value=multiprocessing.get_context("fork"))
        registry._run_in_subprocess = lambda function: function()
    target(*arguments)


def become(module: str, arguments: Sequence[str], log: str, environment: Mapping[str, str] | None = None) -> None:
    """Be a server of vLLM's: run `main` of a module, and write to a log."""
    die_with_parent()
    os.register_at_fork(after_in_child=die_with_parent)
    os.environ.update(environment or {})
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (file, 1), (file, 2)):
        os.dup2(descriptor, target)
    sys.argv = ["vllm", *arguments]
    importlib.import_module(module).main()


@contextlib.contextmanager
def grpc_server(log: Path, *arguments: str) -> Iterator[str]:
    """Start vLLM behind its gRPC servicer, as two processes: the server, and its core with the worker."""
    port = free_port()
    given = ["--host", "127.0.0.1", "--port", str(port), *arguments]
    process = start(become, _GRPC, given, str(log), {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    assert process.pid is not None

    def listens() -> bool:
        assert process.is_alive(), log.read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    try:
        wait_for(listens, 280, "vLLM does not serve")
        yield f"grpc://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.join(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def on_gpu() -> bool:
    import torch

    return bool(torch.cuda.device_count())


@contextlib.contextmanager
def engines() -> Iterator[None]:
    """Have engines, and processes that try guides, be forks if they start meanwhile and there is no GPU."""
    if on_gpu():
        yield
        return
    environment = {**_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    fork = partial(_Fork, environment)
    with mock.patch.multiple(child_processes, Child=fork, python=lambda *command: command):
        yield


class _Fork(Child):
    """A child process that runs a function with the number of an open socket. Its output is not captured."""

    _child_created = False  # what `Popen` reads at its end
    stdout = stderr = None

    def __init__(
        self,
        environment: Mapping[str, str],
        command: tuple[str, str],
        *,
        pass_fds: Sequence[int],
        env: Mapping[str, str] | None = None,
        **same: Any,
    ) -> None:
        (fd,) = pass_fds
        with socket.socket(fileno=os.dup(fd)) as channel:
            self._process = start(_call, command[0], channel, {**(env or os.environ), **environment})
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0)
        return status

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _call(function: str, channel: socket.socket, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None  # its own, which frees its shared memory when it ends, as a real process has
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(str(channel.detach()))
