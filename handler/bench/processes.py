"""Put a load on an HTTP server from several processes, each an event loop with its share of the clients."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from handler.bench.client import Connections, Target, connect
from handler.bench.load import Closed, Load, Result, closed_loop, open_loop
from handler.core import event_loop
from handler.core.errors import ConfigError

WARM_UP_TOKENS = 8
WARM_UP_PROMPT = 1 << 20  # number of the first warm-up prompt; lower numbers are measured
_HEAD_START = 0.05  # seconds until the load begins, so that all processes have heard of it


@dataclass(frozen=True)
class _Share:
    """The share of one process: client numbers `index`, `index + step`, ... of the whole load."""

    target: Target
    load: Load
    index: int
    step: int


def measure(target: Target, load: Load, processes: int = 2, began: Callable[[], object] = lambda: None) -> list[Result]:
    """Run the load, and return every request's result.

    Args:
        began: called when the server is warm and before the load begins.

    Raises:
        ConfigError: nothing listens at the target's address.
    """
    if isinstance(load, Closed):
        processes = min(processes, load.clients)
    spawn = multiprocessing.get_context("spawn")  # fork would copy the locks of this process's threads
    pipes: list[Connection] = []
    running = []
    for index in range(processes):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_process, args=(theirs, _Share(target, load, index, processes)), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        running.append(process)
    try:
        for pipe in pipes:
            _hear(pipe)
        began()
        begin = time.monotonic() + _HEAD_START
        for pipe in pipes:
            pipe.send(begin)
        return [result for pipe in pipes for result in _hear(pipe)]
    finally:
        for pipe in pipes:
            pipe.close()
        for process in running:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


def _hear(pipe: Connection) -> Any:
    try:
        message = pipe.recv()
    except EOFError:
        raise RuntimeError("a load process ended early; its trace is above") from None
    if isinstance(message, ConfigError):
        raise message
    return message


# -- in a load process -----------------------------------------------------------------------------------------------


def _process(pipe: Connection, share: _Share) -> None:
    event_loop.run(_share(pipe, share))


async def _share(pipe: Connection, share: _Share) -> None:
    try:
        connections = await _warm_connections(share)
    except (OSError, ConfigError) as error:
        pipe.send(ConfigError(f"cannot connect to {share.target.url}: {error}"))
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
    """Connect, and warm the server up: a measurement excludes code that never ran and memory never touched."""
    load = share.load
    numbers = range(share.index, load.clients, share.step) if isinstance(load, Closed) else [share.index]
    clients = await asyncio.gather(*(connect(share.target) for _ in numbers))
    requests = []
    for client, number in zip(clients, numbers, strict=True):
        request = share.target.request(WARM_UP_PROMPT + number, WARM_UP_TOKENS)
        requests.append(client.ask(request, WARM_UP_TOKENS, share.target.timeout))
    await asyncio.gather(*requests)  # a failure here occurs again where it is counted
    return Connections(share.target, clients)
