"""The servers that are compared on a core of their own: ours with the echo engine, vLLM's Rust front end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from proof.bench.processes import Server, Worker, lmi_serve
from proof.compare.processes import child_by_command, cpu_seconds, free_port, process_seconds, started

SERVER_CORE, CLIENT_CORE = 0, 1
_PLACES = 4096  # requests that run at once
_READY_SECONDS = 30.0


def _seconds(pid: int) -> float:
    return cpu_seconds(pid).host


class FrontEnd(NamedTuple):
    """A server to compare.

    Attributes:
        start: starts it for this pace, in tokens a second a request; 0: no limit. It runs on the server's core, but
            for an engine that is put on the clients'.
        ping: path of its health check.
        heads: events of a chat before its first token.
        cpu: returns the CPU seconds that count, those of what runs on the server's core.
    """

    start: Callable[[float], AbstractContextManager[Server]]
    ping: str
    heads: int
    cpu: Callable[[int], float] = _seconds


def chat(tokens: int, *, stream: bool = True) -> bytes:
    """Return an HTTP request of exactly so many tokens."""
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": "alpha gamma delta kappa omega sigma theta while"}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


@contextlib.contextmanager
def pinned(core: int) -> Iterator[None]:
    """Bind to this core the processes that are started meanwhile."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _ours(pace: float, **more: str) -> AbstractContextManager[Server]:
    options = {
        **more,
        "option.echo_tokens_per_second": f"{pace:g}",
        "option.max_rolling_batch_size": _PLACES,
        "job_queue_size": _PLACES,
    }
    arguments = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
    return lmi_serve(["--engine", "echo", *arguments], variables={"LMI_LOG_LEVEL": "error"})  # as vllm-rs below


@contextlib.contextmanager
def _ours_apart(pace: float) -> Iterator[Server]:
    with _ours(pace, **{"option.engine_isolation": "process"}) as server:
        for thread in Path(f"/proc/{engine_of(server.pid)}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {CLIENT_CORE})
        yield server


def engine_of(pid: int) -> int:
    """Return the id of the engine's process, which a server of ours has started."""
    return child_by_command(pid, b"engine_process")


def _seconds_without_engine(pid: int) -> float:
    return _seconds(pid) - process_seconds(engine_of(pid))


OURS = FrontEnd(_ours, "/ping", heads=0)
"""With its engine on a thread, as `lmi serve --engine echo` has it."""

OURS_APART = FrontEnd(_ours_apart, "/ping", heads=0, cpu=_seconds_without_engine)
"""With its engine in a process on the clients' core, as vLLM's front end has its mock core."""


def rust(binary: Path, model: Path) -> FrontEnd:
    """Return vLLM's Rust front end. Its mock core runs on the clients' core.

    Args:
        binary: `vllm/vllm-rs` of vLLM's wheel.
        model: a Hugging Face directory with tokenizer, chat template and config.
    """

    @contextlib.contextmanager
    def start(pace: float) -> Iterator[Server]:
        port, handshake = free_port(), free_port()
        url = f"http://127.0.0.1:{port}"
        core = [sys.executable, "-m", "proof.compare.mock_core", f"tcp://127.0.0.1:{handshake}", "--pace", f"{pace:g}"]
        command = [str(binary), "serve", str(model), "--served-model-name", "model", "--port", str(port)]
        command += ["--data-parallel-size-local", "0", "--data-parallel-size", "1"]
        command += ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(handshake)]
        quiet = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}  # else it writes a line a request
        with pinned(CLIENT_CORE):
            engine = subprocess.Popen(core, stdin=subprocess.DEVNULL)
        try:
            with started(command, url, _READY_SECONDS, quiet) as pid:
                yield Server(url, pid)
        finally:
            engine.kill()
            engine.wait()

    return FrontEnd(start, "/health", heads=1)


@contextlib.contextmanager
def on_its_core(front_end: FrontEnd, pace: float, *, half: bool) -> Iterator[Server]:
    """Start a server on its core; `half`: beside a busy process on the same core."""
    with contextlib.ExitStack() as stack:
        with pinned(SERVER_CORE):
            server = stack.enter_context(front_end.start(pace))
            if half:
                stack.callback(Worker("a busy process", _spin).close)
        with pinned(CLIENT_CORE):
            yield server


def _spin(pipe: Connection) -> None:
    while not pipe.poll():
        pass
