"""Run `lmi deploy local`: the emulator, the container behind it, its health checks, and the shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial

import aiohttp
from aiohttp import web

from deploy.emulator.container import Command, Container, Probing, keep_watch, until_ready
from deploy.emulator.endpoint import Component, Endpoint, Status
from deploy.emulator.runtime import Runtime
from deploy.errors import DeployError, Failed


@dataclass(frozen=True)
class Plan:
    """The container and endpoint to serve.

    Args:
        endpoint: its `container`, and those of its components, are the addresses on which the commands listen.
        port: the emulator's; 0: a free one.
        commands: start the containers, by the component's name; "" is the endpoint's own; empty: it runs already.
        adapters: name to directory; loaded when the container is ready, as SageMaker loads adapter components.
    """

    endpoint: Endpoint
    host: str = "127.0.0.1"
    port: int = 8081
    commands: Mapping[str, Command] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    probing: Probing = field(default_factory=Probing)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


Log = Callable[[str, str], None]
"""Called with the component's name, or "", and each line of its container's log."""


@contextlib.asynccontextmanager
async def one_endpoint(plan: Plan, report: Callable[[str], None], log: Log) -> AsyncIterator[str]:
    """Serve the API of the plan's endpoint; yield its URL."""
    async with listening(plan.endpoint, plan.host, plan.port) as url:
        report(f"endpoint {plan.endpoint.name} is Creating at {url}")
        yield url


Front = Callable[[Plan, Callable[[str], None], Log], AbstractAsyncContextManager[str]]
"""The container's front end: takes the plan, `report` and `log`; yields its URL."""


async def serve(
    plan: Plan,
    report: Callable[[str], None],
    log: Log,
    ready: Callable[[str], None],
    front: Front = one_endpoint,
) -> int:
    """Serve until SIGINT or SIGTERM; return the exit status.

    Args:
        report: called with a line about the endpoint.
        log: called with the component's name, or "", and each line of the container's log.
        ready: called with the URL once the endpoint is in service.

    Raises:
        DeployError: the port is in use.
        Failed: a container did not become ready, or an adapter could not be loaded.
    """
    endpoint = plan.endpoint
    endpoint.status = Status.CREATING
    signals = _signals()
    async with front(plan, report, log) as url, _containers(plan.commands, log, signals) as containers:
        stopping = asyncio.ensure_future(signals.wait())
        tasks = {asyncio.ensure_future(_watch(plan, report, lambda: ready(url)))}
        tasks |= {asyncio.ensure_future(_exit(endpoint, *one, report)) for one in containers.items()}
        try:
            running = tasks
            while not stopping.done():
                done, _ = await asyncio.wait({*running, stopping}, return_when=asyncio.FIRST_COMPLETED)
                for task in done & tasks if stopping not in done else ():
                    task.result()
                running = running - done
        finally:
            for task in (*tasks, stopping):
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)
        report("stopping")
    return 0


async def _exit(endpoint: Endpoint, name: str, container: Container, report: Callable[[str], None]) -> None:
    """Wait for a container's exit, and report it. Before the endpoint is in service it fails; later, requests fail.

    Raises:
        Failed: the container has ended before the endpoint was in service.
    """
    failed = await container.wait_for_exit()
    if name:
        failed = Failed(f"inference component {name}: {failed}", failed.advice)
    if endpoint.status is not Status.IN_SERVICE:
        endpoint.status = Status.FAILED
        raise failed
    target = endpoint.components[name] if name else endpoint
    target.healthy, target.ended = False, True
    which = f"Requests to {name}" if name else "Requests"
    report(f"{failed}. {failed.advice}\n{which} get 503 until you stop this (Ctrl-C) and start it again.")


async def _watch(plan: Plan, report: Callable[[str], None], ready: Callable[[], None]) -> None:
    endpoint = plan.endpoint
    own = {name: item for name, item in endpoint.components.items() if item.container and item.adapter is None}
    await asyncio.gather(*(until_ready(endpoint, plan.probing, name) for name in own or [""]))
    await load_adapters(plan)
    endpoint.status = Status.IN_SERVICE
    ready()
    watched: dict[str, Endpoint | Component] = {f"inference component {name}": item for name, item in own.items()}
    watched = watched or {f"endpoint {endpoint.name}": endpoint}
    await asyncio.gather(
        *(keep_watch(target, plan.probing, partial(_tell, report, who)) for who, target in watched.items())
    )


def _tell(report: Callable[[str], None], who: str, what: str) -> None:
    report(f"{who}: {what}")


async def load_adapters(plan: Plan) -> None:
    """Load each adapter with `POST /adapters`, as SageMaker does for adapter components.

    Raises:
        Failed: the container refuses one.
    """
    async with aiohttp.ClientSession() as session:
        for name, path in plan.adapters.items():
            own = plan.endpoint.components[name].container if name in plan.endpoint.components else None
            body = {"name": name, "src": path, "preload": True, "pin": False}
            try:
                async with session.post(f"{own or plan.endpoint.container}/adapters", json=body) as reply:
                    if reply.status != 200:
                        text = (await reply.text(errors="replace")).strip()
                        raise Failed(f"adapter {name}: the container answers {reply.status}: {text}")
            except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                raise Failed(f"adapter {name}: the container did not answer: {error or 'timed out'}") from None


@contextlib.asynccontextmanager
async def listening(endpoint: Endpoint, host: str, port: int) -> AsyncIterator[str]:
    """Serve an endpoint's API; yield the URL.

    Args:
        port: 0: a free one.

    Raises:
        DeployError: the port is in use.
    """
    runner = web.AppRunner(Runtime(endpoint).app(), access_log=None, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise cannot_listen(host, port, error) from None
        host, port = runner.addresses[0][:2]
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}"
    finally:
        await runner.cleanup()


def cannot_listen(host: str, port: int, error: OSError) -> DeployError:
    text = os.strerror(error.errno) if error.errno else str(error)
    return DeployError(f"cannot listen on {host}:{port}: {text}", "Name another one with --port; 0 takes a free one.")


@contextlib.asynccontextmanager
async def _containers(
    commands: Mapping[str, Command], log: Log, signals: _Signals
) -> AsyncIterator[dict[str, Container]]:
    """Start the containers, each in a process group of its own; stop all of them at once at the end."""
    containers: dict[str, Container] = {}

    def kill() -> None:
        for container in containers.values():
            container.kill()

    signals.on_second = kill
    try:
        for name, command in commands.items():
            container = Container(partial(log, name))
            await container.start(command)
            containers[name] = container
        yield containers
    finally:
        await asyncio.gather(*(container.stop() for container in containers.values()))


class _Signals:
    """SIGINT and SIGTERM: the first asks to stop, the second hurries."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self.on_second: Callable[[], None] = lambda: None

    async def wait(self) -> None:
        await self._stop.wait()

    def __call__(self) -> None:
        if self._stop.is_set():
            self.on_second()
        self._stop.set()


def _signals() -> _Signals:
    signals = _Signals()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals)
    return signals
