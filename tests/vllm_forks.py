"""vLLM's processes as forks of one that has imported it, which takes each of them nine seconds otherwise.

An engine has three on a CPU: its own, its core and its worker. As forks it has two, as on one GPU: the core would spin
while the worker computes. Where there is a GPU they are real ones.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any
from unittest import mock

from handler.engines.process import sandbox, supervisor
from tests.environment import clean_environment

_MODELS = ("bert", "llama", "llava", "qwen2_audio", "qwen2_vl", "whisper")
_PRELOADED = (
    *("handler.engines.process.engine_process", "handler.engines.process.sandbox", "handler.engines.vllm.engine"),
    *("vllm.entrypoints.openai.api_server", "vllm.v1.engine.async_llm", "vllm.v1.engine.llm_engine"),
    *("vllm.v1.worker.cpu_worker", *(f"vllm.model_executor.models.{name}" for name in _MODELS)),
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


@contextlib.contextmanager
def engines() -> Iterator[None]:
    """Have engines, and processes that try guides, be forks if they start meanwhile and there is no GPU."""
    import torch

    if torch.cuda.device_count():
        yield
        return
    environment = {**_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    forks = SimpleNamespace(**{**vars(subprocess), "Popen": partial(_Fork, environment)})
    with contextlib.ExitStack() as patched:
        for module in (supervisor, sandbox):
            patched.enter_context(mock.patch.multiple(module, subprocess=forks, python=lambda *command: command))
        yield


class _Fork:
    """In place of a `subprocess.Popen` that runs a function with the number of an open socket."""

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
        self.pid = self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _call(function: str, channel: socket.socket, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None  # its own, which frees its shared memory when it ends, as a real process has
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(str(channel.detach()))
