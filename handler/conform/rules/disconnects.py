"""Clients that go: the engine must stop, as a gauge of its metrics shows, or else the server's speed."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable

from handler.conform import sources
from handler.conform.dialects import Body
from handler.conform.rule import Failed, expect_answer, rule, skip
from handler.conform.rules.hosting import samples
from handler.conform.server import Server

_GAUGES = re.compile(
    r"vllm:num_requests_running|lmi_active_sequences|tgi_batch_current_size|llamacpp:requests_processing"
    r"|dynamo_(frontend|component)_inflight_requests|sglang:num_running_reqs|trtllm_num_requests_running"
)
"""Gauges of requests that engines compute, by the servers that have them."""

_CROWD = 4
"""Abandoned requests, where only the server's speed can show them."""


@rule("disconnect.stream", "The engine stops when the client of a stream disconnects.", sources.HTTP)
async def disconnect_stream(server: Server) -> None:
    body, seconds = await server.long_stream(server.limits.long)
    await _abandon(server, await server.path(stream=True), body, seconds)


@rule("disconnect.whole", "The engine stops when the client of a whole answer disconnects.", sources.HTTP)
async def disconnect_whole(server: Server) -> None:
    body, seconds = await server.long_stream(server.limits.long)
    body = {name: value for name, value in body.items() if name != "stream"}
    await _abandon(server, await server.path(), body, seconds)


async def _abandon(server: Server, path: str, body: Body, seconds: float) -> None:
    """Ask, go away, and see that the engine stops before the answer's own end, `seconds` after its beginning."""
    if await _running(server) is None:
        await _by_speed(server, path, body, seconds)
        return
    idle = await _steady(server)
    hidden = f"no gauge of {server.asking.metrics} shows the request"
    start = time.monotonic()
    async with server.asking_for(path, body) as (_, task):
        while (await _running(server) or 0.0) <= idle:
            if task.done():
                skip(f"{hidden}: it ended after {task.result().seconds:.1f} s")
            if time.monotonic() - start > server.limits.answer:
                skip(hidden)
            await asyncio.sleep(0.01)
    gone = time.monotonic()
    until = min(gone + server.limits.abandoned, start + 0.8 * seconds)
    if until < gone + 0.1:
        skip(f"answers of {seconds:.1f} s end too soon to see it")
    while (running := await _running(server) or 0.0) > idle:
        if time.monotonic() > until:
            raise Failed(
                f"no request that runs {until - gone:.1f} s after its client went",
                asked=f"POST {path}, a request of {seconds:.0f} s, cut off while it ran",
                got=f"{running - idle:g} more than before, by the gauge of {server.asking.metrics}",
            )
        await asyncio.sleep(0.02)


async def _running(server: Server) -> float | None:
    """Return the number of requests that the engine computes; None where no gauge says it."""
    answer = await server.metrics()
    found = [value for name, value in samples(answer).items() if _GAUGES.match(name)] if answer.ok else []
    return max(found) if found else None


async def _steady(server: Server) -> float:
    """Return the gauge when earlier requests have ended."""
    lowest = await _running(server) or 0.0
    for _ in range(10):
        if not lowest:
            break
        await asyncio.sleep(0.1)
        lowest = min(lowest, await _running(server) or 0.0)
    return lowest


async def _by_speed(server: Server, path: str, body: Body, seconds: float) -> None:
    """See twice that a server that a crowd slows down is fast again when the crowd is gone: times alone may deceive."""
    found = [await _slow_after_a_crowd(server, path, body, seconds) for _ in range(2)]
    if all(found):
        raise Failed(
            "the speed of before, once the clients have gone",
            asked=f"POST {path}, {_CROWD} requests of {seconds:.0f} s, cut off while they ran",
            got=found[-1],
        )
    if any(found):
        skip("one trial of two says so: something else keeps the machine busy")


async def _slow_after_a_crowd(server: Server, path: str, body: Body, seconds: float) -> str:
    """Return what shows that the answers of a crowd that went were computed; empty where it shows that they were not.

    The server is slow then, and fast again later; one that stays slow has other work.
    """

    async def one() -> float:
        return expect_answer(await server.generate(tokens=16)).seconds

    async def fastest() -> float:
        return min([await one() for _ in range(3)])

    alone = await fastest()
    start = time.monotonic()
    crowded = await _beside(server, path, body, fastest)
    if crowded < 1.5 * alone:
        skip(f"{server.asking.metrics} has no gauge of running requests, and a crowd does not slow the server down")
    gone = time.monotonic()
    left = seconds - (gone - start) * alone / crowded  # what the crowd would take yet, were each alone: at least
    await asyncio.sleep(min(0.5, server.limits.abandoned))
    fast = math.sqrt(alone * crowded)
    after: list[float] = []
    while len(after) < 3:
        after.append(await one())
        if after[-1] <= fast:
            if time.monotonic() > gone + 0.8 * left:
                skip(f"answers of {seconds:.1f} s end too soon to see it")
            return ""
    until = gone + min(server.limits.patience, 2 * left * crowded / alone)
    while await one() > fast:
        if time.monotonic() > until:
            skip("the server stays slow when the answers must have ended: something else keeps it busy")
    return (
        f"an answer took {alone:.2f} s alone, {crowded:.2f} s beside them, {min(after):.2f} s when they were cut off; "
        f"it was fast again {time.monotonic() - gone:.0f} s later"
    )


async def _beside(server: Server, path: str, body: Body, measure: Callable[[], Awaitable[float]]) -> float:
    """Measure while a crowd is answered."""

    async def one(until: asyncio.Event) -> None:
        async with server.asking_for(path, body):
            await until.wait()

    until = asyncio.Event()
    crowd = [asyncio.ensure_future(one(until)) for _ in range(_CROWD)]
    try:
        await asyncio.sleep(0.1)
        return await measure()
    finally:
        until.set()
        await asyncio.gather(*crowd, return_exceptions=True)
