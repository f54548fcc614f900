"""The beginning and the end: what /ping says, what becomes of the last requests, how the process ends."""

from __future__ import annotations

import asyncio
import time

from handler.conform import sources
from handler.conform.exchange import Answer
from handler.conform.process import Start, Stop
from handler.conform.rule import SAGEMAKER, Failed, expect, rule, skip
from handler.conform.server import PROMPT, Server
from handler.core.errors import ConfigError


async def watch_start(server: Server, seconds: float) -> None:
    """Start the server, and watch it until it is ready.

    Raises:
        ConfigError: it ended, or is not ready within `seconds`.
    """
    lifetime = server.lifetime
    assert lifetime is not None
    early = None
    deadline = time.monotonic() + seconds
    await lifetime.start()
    while not (answer := await server.get("/ping", timeout=server.limits.ping)).ok:
        if await lifetime.has_ended():
            raise ConfigError("lmi conform: the server exited before it was ready; see its output above")
        if answer.status == 404 and await _is_ready(server):
            return  # it has no /ping
        if time.monotonic() > deadline:
            raise ConfigError(f"lmi conform: /ping did not answer 200 within {seconds:.0f} s (--ready): {answer.got}")
        if answer.status and early is None:
            early = await _infer(server)
        await asyncio.sleep(0.05)
    if lifetime.ours:
        lifetime.started = Start(await _infer(server), early)


async def _is_ready(server: Server) -> bool:
    """Whether a server without /ping says that it is ready, at one of the routes that others have."""
    return any([(await server.get(path)).ok for path in ("/health", "/v2/health/ready", "/v1/models")])


async def _infer(server: Server) -> Answer:
    """Ask at /invocations, by the first of its forms that is not refused."""
    for body in (
        {"inputs": PROMPT, "parameters": {"max_new_tokens": 2}},
        {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2},
        {"prompt": PROMPT, "max_tokens": 2},
    ):
        answer = await server.post("/invocations", body)
        if not answer.refused:
            break
    return answer


def _started(server: Server) -> Start:
    if server.lifetime is None or server.lifetime.started is None:
        skip("needs --command, which starts the server")
    return server.lifetime.started


@rule("start.ready", "/ping answers 200 only when the model can serve.", sources.CONTAINER, SAGEMAKER)
async def start_ready(server: Server) -> None:
    answer = _started(server).first
    expect(answer.ok, "an answer to the first request after /ping had said 200", answer)


@rule("start.early", "Before that, a request gets a status of 500 to 599.", sources.HTTP, SAGEMAKER)
async def start_early(server: Server) -> None:
    answer = _started(server).early
    if answer is None:
        skip("the port was closed until the server was ready")
    expect(answer.status >= 500 or answer.failure or answer.ok, "a status of 500 to 599", answer)


# -- the end -----------------------------------------------------------------------------------------------------

_RUNNING = 3.0
"""Seconds of the stream that runs when SIGTERM comes."""


async def _stopped(server: Server) -> Stop:
    """Return what SIGTERM shows; the first rule sends it."""
    lifetime = server.lifetime
    if lifetime is None:
        skip("it stops the server: needs --command or --container")
    if lifetime.stopped is None:
        body, _ = await server.long_stream(min(_RUNNING, server.limits.long))
        async with server.asking_for(await server.path(stream=True), body) as (connection, task):
            await connection.begun(2, server.limits.answer)
            began = time.monotonic()
            await lifetime.terminate()
            later: list[Answer] = []
            while not task.done() and time.monotonic() < began + server.limits.stop:
                await asyncio.sleep(0.2)
                later.append(await server.generate(tokens=2))
            await asyncio.wait([task], timeout=max(0.0, began + server.limits.stop - time.monotonic()))
            ended = await lifetime.wait(began + server.limits.stop - time.monotonic())
            seconds = time.monotonic() - began if ended else None
        lifetime.stopped = Stop(task.result(), later, seconds)
    return lifetime.stopped


@rule("stop.finishes", "After SIGTERM a running stream continues to its end.", sources.CONTAINER, SAGEMAKER, last=True)
async def stop_finishes(server: Server) -> None:
    answer = (await _stopped(server)).running
    expect(answer.ok and answer.is_uncut, "a whole stream", answer)
    broken = [event for event in answer.events if "error" in event]
    expect(not broken, "a stream without an error", answer)


@rule(
    "stop.new-work",
    "After SIGTERM new requests are answered or refused, not cut.",
    sources.CONTAINER,
    SAGEMAKER,
    last=True,
)
async def stop_new_work(server: Server) -> None:
    for answer in (await _stopped(server)).later:
        refused = answer.status == 503 or (answer.failure and not answer.status)
        expect(
            answer.ok or (refused and answer.failure != "timeout"), "an answer, status 503, or no connection", answer
        )


@rule("stop.exit", "The process has ended 30 s after SIGTERM.", sources.CONTAINER, SAGEMAKER, last=True)
async def stop_exit(server: Server) -> None:
    if (await _stopped(server)).seconds is None:
        raise Failed(f"an end {server.limits.stop:g} s after SIGTERM", asked="SIGTERM", got="it still runs")
