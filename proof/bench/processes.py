"""Processes for a measurement: servers on free loopback ports, load generators, and an engine without a server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NamedTuple

from handler.config import environment
from handler.core import loop
from handler.core.errors import ConfigError
from handler.core.values import Finish, Sampling
from handler.engines import load, load_tokenizer
from handler.engines.base import Engine, EngineRequest, Output, Step, Tokenizer
from handler.engines.process.engine_process import Spec
from proof.bench.client import (
    UNAUTHORIZED,
    Closed,
    Connections,
    Load,
    Result,
    Target,
    closed_loop,
    open_loop,
    prompt,
    refused_key,
)

_LISTENING = re.compile(r"listening on (https?://[^\s;]+)")
_SERVE = """
import signal
from handler.core.child_processes import die_with_parent
die_with_parent(signal.SIGTERM)
from handler.cli import main
raise SystemExit(main())
"""  # SIGTERM as at the end of a measurement, so that the server itself stops its engine's processes
_GRACE = 35.0  # seconds; the server drains for up to 20 s before it exits


class Server(NamedTuple):
    url: str
    pid: int


def lmi_serve(
    arguments: Sequence[str], *, timeout: float = 300.0, variables: Mapping[str, str] | None = None
) -> AbstractContextManager[Server]:
    """Start `lmi serve` on a free port, and wait until it is ready. The server also ends if this process is killed.

    Args:
        arguments: arguments of `lmi serve`, without the port.
        timeout: number of seconds within which the server must be ready.
        variables: environment variables to add to the environment of this process.

    Raises:
        ConfigError: the server does not start. The message contains its last lines of output.
    """
    command = [sys.executable, "-c", _SERVE, "serve", *arguments, "--port", "0"]
    return process(command, timeout=timeout, variables=variables)


def option_arguments(options: Sequence[str]) -> list[str]:
    """Return the `lmi serve` arguments for options of the form KEY=VALUE."""
    return [part for option in options for part in ("-o", option)]


@contextlib.contextmanager
def process(
    command: Sequence[str], *, timeout: float = 30.0, variables: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Start a server process that writes `listening on URL` to stderr when it is ready."""
    variables = {**environment.of_embedded_server(), **(variables or {})}
    with contextlib.ExitStack() as stack:
        with _undisturbed():
            running = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, text=True
            )  # what the server prints does not belong to this program's standard output, which may be JSON
            output = _Output(running)
            stack.callback(_end, running, output)
        yield Server(output.url(timeout), running.pid)


def _end(running: subprocess.Popen[str], output: _Output) -> None:
    running.terminate()
    try:
        running.wait(_GRACE)
    except subprocess.TimeoutExpired:
        running.kill()
        running.wait()
    output.close()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait, because nobody would end a process that is only being started."""
    if threading.current_thread() is not threading.main_thread():  # which gets no signals
        yield
        return
    came = list[int]()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that the servers that this program has started are stopped.

    Raises:
        KeyboardInterrupt: SIGTERM came; at the end, if a destructor, say, has swallowed the interrupt.
    """
    came = list[int]()

    def interrupt(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
        if came:
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGTERM, before)


class _Output:
    """A thread that reads the output of a process, because a full pipe would block the process."""

    def __init__(self, running: subprocess.Popen[str]) -> None:
        self._running = running
        self._last: deque[str] = deque(maxlen=20)
        self._url = ""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def url(self, timeout: float) -> str:
        deadline = time.monotonic() + timeout
        while not self._url:
            if self._running.poll() is not None or time.monotonic() > deadline:
                raise ConfigError(f"the server did not start:\n{''.join(self._last).rstrip()}")
            time.sleep(0.02)
        return self._url

    def close(self) -> None:
        self._thread.join()
        assert self._running.stderr is not None
        self._running.stderr.close()

    def _read(self) -> None:
        assert self._running.stderr is not None
        for line in self._running.stderr:
            self._last.append(line)
            if match := _LISTENING.search(line):
                self._url = match[1]


# -- load an HTTP server from several worker processes, each with an event loop for its share of the clients -----------


WARM_UP_TOKENS = 8
WARM_UP_PROMPT = 1 << 20  # number of the first warm-up prompt; measured prompts have lower numbers
_HEAD_START = 0.05  # seconds until the load begins, so that all processes are ready by then


class Worker:
    """A spawned process that is connected by a pipe. It should end when the pipe is closed.

    Args:
        name: name of the process in error messages.
        target: the function that the process calls with its end of the pipe and with `arguments`.
        arguments: further arguments of `target`.
        daemon: whether it is a daemon process, which cannot start other processes.
    """

    def __init__(self, name: str, target: Callable[..., None], *arguments: Any, daemon: bool = True) -> None:
        spawn = multiprocessing.get_context("spawn")  # fork would copy the locks of this process's threads
        self._name = name
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=target, args=(theirs, *arguments), daemon=daemon)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send(self, message: Any) -> None:
        self._pipe.send(message)

    def receive(self) -> Any:
        """Wait for a message, and return it.

        Raises:
            ConfigError: the process has sent this error, or has ended.
        """
        try:
            message = self._pipe.recv()
        except EOFError:
            raise ConfigError(f"{self._name} ended early; see its traceback above") from None
        if isinstance(message, ConfigError):
            raise message
        return message

    def close(self, grace: float = 5.0) -> None:
        """Close the pipe, and kill the process if it does not end within `grace` seconds."""
        self._pipe.close()
        self._process.join(grace)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


@dataclass(frozen=True)
class _Share:
    """The share of the load for one process: the clients or requests with the indexes `index`, `index + step`, ..."""

    target: Target
    load: Load
    index: int
    step: int


def measure(target: Target, load: Load, processes: int = 2, began: Callable[[], object] = lambda: None) -> list[Result]:
    """Run a load, and return the results of all requests.

    Args:
        processes: maximum number of processes that generate the load.
        began: a function that is called after the warm-up and before the load begins.

    Raises:
        ConfigError: a process cannot connect to the server, or ended early.
    """
    if isinstance(load, Closed):
        processes = min(processes, load.clients)
    with contextlib.ExitStack() as stack:
        workers = []
        for index in range(processes):
            worker = Worker("a load process", _process, _Share(target, load, index, processes))
            stack.callback(worker.close)
            workers.append(worker)
        for worker in workers:
            worker.receive()
        began()
        begin = time.monotonic() + _HEAD_START
        for worker in workers:
            worker.send(begin)
        return [result for worker in workers for result in worker.receive()]


# -- in a load process -----------------------------------------------------------------------------------------------


def _process(pipe: Connection, share: _Share) -> None:
    loop.run(_share(pipe, share))


async def _share(pipe: Connection, share: _Share) -> None:
    try:
        connections = await _warm_connections(share)
    except (OSError, ConfigError) as error:
        if not isinstance(error, ConfigError):
            error = ConfigError(f"cannot connect to {share.target.url}: {error}")
        with contextlib.suppress(BrokenPipeError):  # another process has reported the error already
            pipe.send(error)
        return
    pipe.send("ready")
    begin = await asyncio.to_thread(pipe.recv)
    await asyncio.sleep(begin - time.monotonic())
    load = share.load
    if isinstance(load, Closed):
        clients = range(share.index, load.clients, share.step)
        results = await closed_loop(connections.ask, [load.numbers(client, begin) for client in clients])
    else:
        arrivals = list(enumerate(load.due()))[share.index :: share.step]
        results = await open_loop(connections.ask, arrivals, begin)
    connections.close()
    pipe.send(results)


async def _warm_connections(share: _Share) -> Connections:
    """Open connections and warm up the server, so that the measurement excludes the first use of code and memory.

    Raises:
        OSError: a connection was refused.
        ConfigError: the server refuses the key.
    """
    load = share.load
    numbers = range(share.index, load.clients, share.step) if isinstance(load, Closed) else [share.index]
    connections = Connections(share.target)
    await asyncio.gather(*(connections.open() for _ in numbers))
    first = await connections.ask(WARM_UP_PROMPT + share.index, WARM_UP_TOKENS)
    if first.error == UNAUTHORIZED:
        connections.close()
        raise refused_key(share.target.url, environment.api_key())
    # Another failure is not reported here, because it will occur again in the measurement.
    remaining = [number for number in numbers if number != share.index]
    await asyncio.gather(*(connections.ask(WARM_UP_PROMPT + number, WARM_UP_TOKENS) for number in remaining))
    return connections


# -- measure the engine alone, without HTTP, text or clients, to compare a server with it ------------------------------


@dataclass(frozen=True)
class Work:
    """The engine-only equivalent of a closed loop, with the same prompts and `clients` concurrent sequences.

    If `seconds` is set, the prompts are repeated for that time.
    """

    clients: int
    requests: int
    tokens: int
    prompt_words: int
    first: int = 0
    seconds: float | None = None


class Run(NamedTuple):
    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Return the tokens per second."""
        return self.tokens / self.seconds


class Offline:
    """An engine without a server, in a separate process, which is idle between measurements."""

    def __init__(self, spec: Spec) -> None:
        self._worker = Worker("the engine without a server", _engine, spec)
        self.close = self._worker.close

    def wait_ready(self) -> None:
        self._worker.receive()

    def measure(self, work: Work) -> Run:
        self._worker.send(work)
        run = self._worker.receive()
        assert isinstance(run, Run)
        return run


def _engine(pipe: Connection, spec: Spec) -> None:
    """Load the engine, report that it is ready, and measure on request until the pipe is closed."""
    engine, tokenizer = load(*spec), load_tokenizer(*spec)
    pipe.send("ready")
    keys = itertools.count(1)
    while True:
        try:
            work = pipe.recv()
        except EOFError:
            engine.close()
            return
        warm_up = replace(work, tokens=WARM_UP_TOKENS, requests=1, seconds=None, first=WARM_UP_PROMPT)
        run(engine, warm_up, _encode(tokenizer, warm_up), keys)
        pipe.send(run(engine, work, _encode(tokenizer, work), keys))


def _encode(tokenizer: Tokenizer, work: Work) -> list[list[int]]:
    """Encode all prompts, so that tokenization is not part of the measurement."""
    numbers = range(work.first, work.first + work.clients * work.requests)
    return [tokenizer.encode(prompt(number, work.prompt_words)).ids for number in numbers]


def run(engine: Engine, work: Work, prompts: list[list[int]], keys: Iterator[int]) -> Run:
    """Generate all sequences, with `work.clients` of them running at a time, and measure the duration.

    Raises:
        RuntimeError: a sequence ended before its full length.
    """
    sampling = Sampling(max_new_tokens=work.tokens, ignore_eos=True)
    lengths: dict[int, int] = {}
    num_tokens = 0
    began = time.monotonic()
    waiting = _prompts(work, prompts, began)

    def start(maximum: int) -> None:
        for ids in itertools.islice(waiting, maximum):
            engine.add(EngineRequest(key := next(keys), ids, sampling))
            lengths[key] = 0

    start(work.clients)
    while lengths:
        for output in _outputs(engine.step()):
            num_tokens += len(output.ids)
            lengths[output.key] += len(output.ids)
            if output.finish is None:
                continue
            if output.finish is not Finish.LENGTH or lengths.pop(output.key) != work.tokens:
                raise RuntimeError(f"the engine ended a sequence early: {output}")
            start(1)
    return Run(num_tokens, time.monotonic() - began)


def _outputs(step: Step) -> Iterator[Output]:
    """Yield all outputs of a step, including outputs that are stored in columns."""
    for key, id, logprob in zip(step.keys, step.ids, step.logprobs, strict=True):
        yield Output(key, (id,), (logprob,))
    yield from step.others


def _prompts(work: Work, prompts: list[list[int]], began: float) -> Iterator[list[int]]:
    if work.seconds is None:
        yield from prompts
        return
    for ids in itertools.cycle(prompts):
        if time.monotonic() >= began + work.seconds:
            return
        yield ids
