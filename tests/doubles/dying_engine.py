"""An engine whose core dies as vLLM's does: in a process of its own, with the reason far above the last lines.

From vLLM 0.19's source: the core's process logs its exception on standard output, each line with a prefix, sends
ENGINE_CORE_DEAD, and raises the exception again, so that multiprocessing writes it to standard error
(`run_engine_core` in vllm/v1/engine/core.py, `decorate_logs` in vllm/utils/system_utils.py). The client raises an
error without the reason (vllm/v1/engine/exceptions.py, `launch_core_engines` in vllm/v1/engine/utils.py).
"""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection

from handler.core.child_processes import serving_host
from handler.engines.base import EngineInfo, EngineRequest, Step
from handler.engines.process.engine_process import run
from handler.engines.process.ipc import Messages
from handler.engines.process.supervisor import end_with_children, end_with_this_process

MAIN = "tests.doubles.dying_engine:main"
MANNER = "DYING_ENGINE"
"""The variable that says how the core dies: a word of each of the sets below."""
REASON = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB for /srv/models/a.safetensors"
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
NOT_STARTED = "Engine core initialization failed. See root cause above. Failed core proc(s): {}"
LAST = b"the last words, without an end"
LONG = b"x" * 300_000


class EngineDeadError(Exception):
    """vLLM's error for requests whose core has died."""


def words(descriptor: int) -> bytes:
    """Return what the core writes to a file descriptor: the reason, then 35 other lines."""
    prefix = b"(EngineCore pid=7) " + (b"ERROR 11-30 20:39:15 [core.py:1110] " if descriptor == 1 else b"")
    head = b"EngineCore encountered a fatal error." if descriptor == 1 else b"Process EngineCore:"
    trace = [head, b"Traceback (most recent call last):", b'  File "/opt/vllm/core.py", line 9, in step', b"    f()"]
    lines = [LONG]
    for line in [*trace, REASON.encode(), b"CUDA kernel errors might be asynchronously reported"]:
        lines += [
            prefix + line,
            b"(Worker_TP1 pid=9) INFO 11-30 20:39:15 [worker.py:5] \xff\xfe ValueError: of another",
        ]
    lines += [b"[rank0]:[W1130 20:39:15 ProcessGroup.cpp:1496] Warning: \xc3( was not destroyed"] * 34
    return b"\n".join([*lines, LONG + b"\r", LAST])


def _core(channel: Connection) -> None:
    manner = os.environ[MANNER]
    if "step" in manner:
        channel.recv()
    for descriptor in (1, 2):
        text = words(descriptor)
        while f"output{descriptor}" in manner and text:
            text = text[os.write(descriptor, text[:1000]) :]
    if "raises" in manner:
        channel.send("ENGINE_CORE_DEAD")
        time.sleep(600)  # it frees its memory; it is killed with the engine
    os._exit(1)


class Dying:
    """An engine that loses its core at the first request, or while it loads."""

    info = EngineInfo(name="dying", version="0", device="cpu", dtype="f32", max_total_tokens=100)

    def __init__(self) -> None:
        end_with_this_process()
        context = multiprocessing.get_context("spawn")
        # Both ends are kept, because vLLM's sockets do not tell that the core has ended.
        self._channel, self._theirs = context.Pipe()
        context.Process(target=_core, args=(self._theirs,), name="EngineCore", daemon=True).start()
        if "load" in os.environ[MANNER]:
            self._channel.recv()
            raise RuntimeError(NOT_STARTED)
        self._stop_watch = end_with_children()

    def add(self, request: EngineRequest) -> None:
        self._channel.send("a request")

    def cancel(self, key: int) -> None:
        pass

    def step(self) -> Step:
        self._channel.recv()
        raise EngineDeadError(DEAD)

    def close(self) -> None:
        self._stop_watch()


def main(fd: str) -> None:
    """Run the engine, as `handler.engines.process.engine_process.main` runs one."""
    with serving_host(fd) as channel:
        Messages(channel).next()
        run(Dying, channel)  # type: ignore[arg-type]  # it has no adapters
