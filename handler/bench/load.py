"""The load generator: processes of its own, each an event loop with its share of the clients.

Closed loop: every client sends its next request when the last answer is complete. Open loop: requests are sent when
they are due, however slow the answers are, which is what a service's users do.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from handler.bench.answer import Result
from handler.bench.client import Client, Target, connect, failed
from handler.core import event_loop
from handler.core.errors import ConfigError

WARM_UP_TOKENS = 8
WARM_UP_PROMPT = 1 << 20  # its number; those before it are measured
_HEAD_START = 0.05  # seconds, so that all processes have heard when to begin
_PAUSE = 0.05  # seconds after a failure, before the client tries again


@dataclass(frozen=True)
class Closed:
    """`clients` that each send `requests`, or go on for `seconds` where that is set (the last answers are awaited)."""

    clients: int
    requests: int = 2
    seconds: float | None = None


@dataclass(frozen=True)
class Open:
    """`rate` requests a second for `seconds`, at random times (a Poisson process) or evenly."""

    rate: float
    seconds: float = 10.0
    poisson: bool = True
    seed: int = 0

    def due(self) -> list[float]:
        """Seconds after the beginning at which a request is to be sent."""
        if not self.poisson:
            return [number / self.rate for number in range(1, int(self.seconds * self.rate) + 1)]
        gap = random.Random(self.seed).expovariate
        times: list[float] = []
        at = 0.0
        while (at := at + gap(self.rate)) <= self.seconds:
            times.append(at)
        return times


Load = Closed | Open


@dataclass(frozen=True)
class _Share:
    """What one process does: client numbers `index`, `index + step`, ... of the whole load."""

    target: Target
    load: Load
    index: int
    step: int


def measure(target: Target, load: Load, processes: int = 2, began: Callable[[], object] = lambda: None) -> list[Result]:
    """Run the load and return every request's result; `began` is called when the server is warm and nothing runs.

    Raises:
        ConfigError: nobody listens at the target's address.
    """
    if isinstance(load, Closed):
        processes = min(processes, load.clients)
    spawn = multiprocessing.get_context("spawn")  # fork would take this process's threads' locks along
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
    generate = _closed if isinstance(share.load, Closed) else _open
    try:
        clients = await _warm_clients(share)
    except (OSError, ConfigError) as error:
        pipe.send(ConfigError(f"cannot connect to {share.target.url}: {error}"))
        return
    pipe.send("ready")
    begin = await asyncio.to_thread(pipe.recv)
    await asyncio.sleep(begin - time.monotonic())
    pipe.send(await generate(share, clients, begin))


async def _warm_clients(share: _Share) -> list[Client]:
    """Connected, and the server warm: code that never ran and memory never touched are no part of a measure."""
    load = share.load
    numbers = range(share.index, load.clients, share.step) if isinstance(load, Closed) else [share.index]
    clients = await asyncio.gather(*(connect(share.target) for _ in numbers))
    asking = []
    for client, number in zip(clients, numbers, strict=True):
        request = share.target.request(WARM_UP_PROMPT + number, WARM_UP_TOKENS)
        asking.append(client.ask(request, WARM_UP_TOKENS, share.target.timeout))
    await asyncio.gather(*asking)  # an error here will come again where it is counted
    return list(clients)


async def _closed(share: _Share, clients: Sequence[Client], begin: float) -> list[Result]:
    load = share.load
    assert isinstance(load, Closed)
    deadline = None if load.seconds is None else begin + load.seconds

    async def user(client: Client | None, number: int) -> list[Result]:
        results: list[Result] = []
        while len(results) < load.requests if deadline is None else time.monotonic() < deadline:
            request = number + len(results) * load.clients
            client, result = await _ask(share.target, client, request)
            results.append(result)
            if result.error:
                await asyncio.sleep(_PAUSE)
        return results

    numbers = range(share.index, load.clients, share.step)
    users = await asyncio.gather(*(user(client, number) for client, number in zip(clients, numbers, strict=True)))
    return [result for results in users for result in results]


async def _open(share: _Share, clients: Sequence[Client], begin: float) -> list[Result]:
    load = share.load
    assert isinstance(load, Open)
    idle = list(clients)

    async def one(number: int, due: float) -> Result:
        client = idle.pop() if idle else None
        client, result = await _ask(share.target, client, number, due)
        if client is not None and not client.closed:
            idle.append(client)
        return result

    tasks = []
    for number, after in list(enumerate(load.due()))[share.index :: share.step]:
        await asyncio.sleep(begin + after - time.monotonic())
        tasks.append(asyncio.ensure_future(one(number, begin + after)))
    results = await asyncio.gather(*tasks)
    for client in idle:
        client.close()
    return results


async def _ask(
    target: Target, client: Client | None, number: int, due: float | None = None
) -> tuple[Client | None, Result]:
    """One request on `client`, or on a new connection if that is gone."""
    start = time.monotonic() if due is None else due
    if client is None or client.closed:
        try:
            client = await connect(target)
        except OSError:
            return client, failed(start, "cannot connect")
    return client, await client.ask(target.request(number), target.tokens, target.timeout, due)
