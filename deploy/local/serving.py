"""Run `lmi deploy local`: the emulator, the container behind it, its health checks, and the shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import aiohttp
from aiohttp import web

from deploy.errors import DeployError, Failed
from deploy.local.container import Command, Container
from deploy.local.endpoint import Endpoint, Status
from deploy.local.health import Probing, keep_watch, until_ready
from deploy.local.runtime import Runtime
from deploy.local.store import Store
from deploy.local.transform import Containers


@dataclass(frozen=True)
class Plan:
    """The container and endpoint to serve.

    Args:
        endpoint: its `container` is the address on which the command listens.
        port: the emulator's; 0: a free one.
        command: None: the container runs already.
        adapters: name to directory; loaded when the container is ready, as SageMaker loads adapter components.
        store: the directory in place of S3.
    """

    endpoint: Endpoint
    host: str = "127.0.0.1"
    port: int = 8081
    command: Command | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    probing: Probing = field(default_factory=Probing)
    store: Path | None = None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def one_endpoint(plan: Plan, report: Callable[[str], None], log: Callable[[str], None]) -> AsyncIterator[str]:
    """Serve the API of the plan's endpoint; yield its URL."""
    store = Store(plan.store) if plan.store else None
    containers = None if plan.command is None else partial(_job_container, plan.command, plan.probing, log)
    async with listening(plan.endpoint, store, plan.host, plan.port, containers) as url:
        report(f"endpoint {plan.endpoint.name} is Creating at {url}")
        yield url


Front = Callable[[Plan, Callable[[str], None], Callable[[str], None]], AbstractAsyncContextManager[str]]
"""What is before the container: takes the plan, where to report, and where containers' lines go; yields its URL."""


async def serve(
    plan: Plan,
    report: Callable[[str], None],
    log: Callable[[str], None],
    ready: Callable[[str], None],
    front: Front = one_endpoint,
) -> int:
    """Serve until SIGINT or SIGTERM; return the exit status.

    Args:
        report: called with a line about the endpoint.
        log: called with each line of the container's log.
        ready: called with the URL once the endpoint is in service.

    Raises:
        DeployError: the port is in use.
        Failed: the container did not become ready, or an adapter could not be loaded.
    """
    endpoint = plan.endpoint
    endpoint.status = Status.CREATING
    signals = _signals()
    async with front(plan, report, log) as url, _container(plan.command, log, signals) as container:
        watching = asyncio.ensure_future(_watch(plan, report, lambda: ready(url)))
        dying = asyncio.ensure_future(container.wait_for_exit() if container else _never())
        stopping = asyncio.ensure_future(signals.wait())
        try:
            await asyncio.wait({watching, dying, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if dying.done() and not stopping.done():
                _report_exit(endpoint, dying.result(), report)
                watching.cancel()
                await stopping
            elif not stopping.done():
                watching.result()  # ends only by failing
        finally:
            tasks = (watching, dying, stopping)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        report("stopping")
    return 0


async def _never() -> Failed:
    await asyncio.Event().wait()
    raise AssertionError


def _report_exit(endpoint: Endpoint, failed: Failed, report: Callable[[str], None]) -> None:
    """Report the container's exit. Before it is in service the endpoint fails; later, requests fail."""
    if endpoint.status is not Status.IN_SERVICE:
        endpoint.status = Status.FAILED
        raise failed
    endpoint.healthy = False
    report(f"{failed}. {failed.advice}\nRequests get 503 until you stop this (Ctrl-C) and start it again.")


async def _watch(plan: Plan, report: Callable[[str], None], ready: Callable[[], None]) -> None:
    endpoint = plan.endpoint
    await until_ready(endpoint, plan.probing)
    await load_adapters(plan)
    endpoint.status = Status.IN_SERVICE
    ready()
    await keep_watch(endpoint, plan.probing, lambda what: report(f"endpoint {endpoint.name}: {what}"))


async def load_adapters(plan: Plan) -> None:
    """Load each adapter with `POST /adapters`, as SageMaker does for adapter components.

    Raises:
        Failed: the container refuses one.
    """
    async with aiohttp.ClientSession() as session:
        for name, path in plan.adapters.items():
            body = {"name": name, "src": path, "preload": True, "pin": False}
            try:
                async with session.post(f"{plan.endpoint.container}/adapters", json=body) as reply:
                    if reply.status != 200:
                        text = (await reply.text(errors="replace")).strip()
                        raise Failed(f"adapter {name}: the container answers {reply.status}: {text}")
            except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                raise Failed(f"adapter {name}: the container gave no answer: {error or 'time is over'}") from None


@contextlib.asynccontextmanager
async def listening(
    endpoint: Endpoint, store: Store | None, host: str, port: int, containers: Containers | None = None
) -> AsyncIterator[str]:
    """Serve an endpoint's API; yield the URL.

    Args:
        port: 0: a free one.
        containers: starts a transform job's own container; None: there are no jobs.

    Raises:
        DeployError: the port is in use.
    """
    runner = web.AppRunner(
        Runtime(endpoint, store, containers).app(), access_log=None, handler_cancellation=True, shutdown_timeout=1
    )
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
async def _container(
    command: Command | None, log: Callable[[str], None], signals: _Signals
) -> AsyncIterator[Container | None]:
    if command is None:
        yield None
        return
    container = Container(log)
    await container.start(command)
    signals.on_second = container.kill
    try:
        yield container
    finally:
        await container.stop()


@contextlib.asynccontextmanager
async def _job_container(
    command: Command, probing: Probing, log: Callable[[str], None], variables: Mapping[str, str]
) -> AsyncIterator[str]:
    """Start a transform job's own container, wait until it is ready, and stop it at the end.

    Raises:
        Failed: it ended, or did not become ready.
    """
    port = free_port()
    ours = {**command.environment, **variables, "SAGEMAKER_BIND_TO_PORT": str(port)}
    container = Container(lambda line: log(f"(transform) {line}"))
    await container.start(replace(command, environment=ours))
    url = f"http://127.0.0.1:{port}"
    ready = asyncio.ensure_future(until_ready(Endpoint(url), probing))
    dying = asyncio.ensure_future(container.wait_for_exit())
    try:
        await asyncio.wait({ready, dying}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            raise dying.result()
        ready.result()
        yield url
    finally:
        for task in (ready, dying):
            task.cancel()
        await asyncio.gather(ready, dying, return_exceptions=True)
        await container.stop()


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
