"""Implementation of `lmi deploy local`, which runs the emulator and its containers until a signal stops them."""

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

from deploy.emulator.container import Command, ContainerProcess, Probing, keep_watch, until_ready
from deploy.emulator.endpoint import Endpoint, EndpointComponent, Status
from deploy.emulator.runtime import RuntimeEmulator
from deploy.errors import DeployError, Failed


@dataclass(frozen=True)
class LocalPlan:
    """The endpoint and the containers to serve.

    Args:
        endpoint: the endpoint. The processes of `commands` listen on the URLs of its container and of its components'
            containers.
        port: port of the emulator, or 0 for any free port.
        commands: commands that start the containers, by component name. The endpoint's own container has the name "".
            If empty, the container is already running.
        adapters: directories of adapters by name. They are loaded when the container is ready, as SageMaker loads
            adapter components.
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
"""Callback for each line of a container log. Its first argument is the component name, or ""."""


@contextlib.asynccontextmanager
async def endpoint_front(plan: LocalPlan, report: Callable[[str], None], log: Log) -> AsyncIterator[str]:
    """Serve the API of the plan's endpoint, and yield its URL."""
    async with listening(plan.endpoint, plan.host, plan.port) as url:
        report(f"endpoint {plan.endpoint.name} is starting at {url}")
        yield url


Front = Callable[[LocalPlan, Callable[[str], None], Log], AbstractAsyncContextManager[str]]
"""Context manager that serves an API in front of the container. It accepts `plan`, `report` and `log`, and yields the
API's URL."""


async def serve(
    plan: LocalPlan,
    report: Callable[[str], None],
    log: Log,
    ready: Callable[[str], None],
    front: Front = endpoint_front,
) -> int:
    """Serve until SIGINT or SIGTERM, and return the exit status.

    Args:
        report: callback for each line about the endpoint state.
        log: callback for each line of a container log. Its first argument is the component name, or "".
        ready: callback that receives the URL when the endpoint is in service.
        front: context manager that serves the API in front of the container.

    Raises:
        DeployError: the API cannot listen on the host and port.
        Failed: a container exited or did not become ready, or an adapter could not be loaded.
    """
    endpoint = plan.endpoint
    endpoint.status = Status.CREATING
    signals = _signals()
    async with front(plan, report, log) as url, _containers(plan.commands, log, signals) as containers:
        stopping = asyncio.ensure_future(signals.wait())
        tasks = {asyncio.ensure_future(_watch(plan, report, lambda: ready(url)))}
        tasks |= {asyncio.ensure_future(_exit(endpoint, *container, report)) for container in containers.items()}
        await _until(stopping, tasks)
        report("stopping")
    return 0


async def _until(stopping: asyncio.Task[None], tasks: set[asyncio.Task[None]]) -> None:
    """Wait until `stopping` ends, and cancel the tasks. An error in a task ends the wait and is raised."""
    running = tasks
    try:
        while not stopping.done():
            done, _ = await asyncio.wait({*running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in done & tasks if stopping not in done else ():
                task.result()
            running = running - done
    finally:
        for task in (*tasks, stopping):
            task.cancel()
        await asyncio.gather(*tasks, stopping, return_exceptions=True)


async def _exit(endpoint: Endpoint, name: str, container: ContainerProcess, report: Callable[[str], None]) -> None:
    """Wait until a container exits, and report it. The container's endpoint or component then rejects requests.

    Raises:
        Failed: the container exited before the endpoint was in service. The endpoint's status is then Failed.
    """
    failed = await container.wait_for_exit()
    if name:
        failed = Failed(f"inference component {name}: {failed}", failed.advice)
    if not endpoint.status.is_in_service:
        endpoint.status = Status.FAILED
        raise failed
    target = endpoint.components[name] if name else endpoint
    target.status = Status.EXITED
    which = f"Requests to {name}" if name else "Requests"
    report(f"{failed}. {failed.advice}\n{which} get status 503 until you stop this command (Ctrl-C) and run it again.")


async def _watch(plan: LocalPlan, report: Callable[[str], None], ready: Callable[[], None]) -> None:
    endpoint = plan.endpoint
    with_container = {
        name: item for name, item in endpoint.components.items() if item.container and item.adapter is None
    }
    await asyncio.gather(*(until_ready(endpoint, plan.probing, name) for name in with_container or [""]))
    await load_adapters(plan)
    endpoint.status = Status.IN_SERVICE
    ready()
    watched: dict[str, Endpoint | EndpointComponent] = {
        f"inference component {name}": item for name, item in with_container.items()
    }
    watched = watched or {f"endpoint {endpoint.name}": endpoint}
    await asyncio.gather(
        *(keep_watch(target, plan.probing, partial(_tell, report, who)) for who, target in watched.items())
    )


def _tell(report: Callable[[str], None], who: str, text: str) -> None:
    report(f"{who}: {text}")


async def load_adapters(plan: LocalPlan) -> None:
    """Load each adapter with `POST /adapters`, as SageMaker does for adapter components.

    Raises:
        Failed: the container rejected an adapter, or did not respond.
    """
    # Without reuse, a second response of the container cannot be taken for that of the next adapter.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        for name, path in plan.adapters.items():
            container = plan.endpoint.components[name].container if name in plan.endpoint.components else None
            body = {"name": name, "src": path, "preload": True, "pin": False}
            try:
                async with session.post(f"{container or plan.endpoint.container}/adapters", json=body) as reply:
                    if reply.status != 200:
                        text = (await reply.text(errors="replace")).strip()
                        raise Failed(f"adapter {name}: the container responded with status {reply.status}: {text}")
            except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                raise Failed(f"adapter {name}: the container did not respond: {error or 'timed out'}") from None


@contextlib.asynccontextmanager
async def listening(endpoint: Endpoint, host: str, port: int) -> AsyncIterator[str]:
    """Serve an endpoint's API, and yield its URL.

    Args:
        port: port to listen on, or 0 for any free port.

    Raises:
        DeployError: the API cannot listen on the host and port.
    """
    runner = web.AppRunner(
        RuntimeEmulator(endpoint).app(), access_log=None, handler_cancellation=True, shutdown_timeout=1
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


def cannot_listen(host: str, port: int, error: OSError, option: str = "--port") -> DeployError:
    text = os.strerror(error.errno) if error.errno else str(error)
    advice = f"Choose another port with {option}, or {option} 0 for any free port."
    return DeployError(f"cannot listen on {host}:{port}: {text}", advice)


@contextlib.asynccontextmanager
async def _containers(
    commands: Mapping[str, Command], log: Log, signals: _Signals
) -> AsyncIterator[dict[str, ContainerProcess]]:
    """Start the containers, each in its own process group, and stop them concurrently on exit.

    A second signal kills them immediately.
    """
    containers: dict[str, ContainerProcess] = {}

    def kill() -> None:
        for container in containers.values():
            container.kill()

    signals.on_second = kill
    try:
        for name, command in commands.items():
            container = ContainerProcess(partial(log, name))
            await container.start(command)
            containers[name] = container
        yield containers
    finally:
        await asyncio.gather(*(container.stop() for container in containers.values()))


class _Signals:
    """A handler for SIGINT and SIGTERM. The first signal ends `wait`; later signals call `on_second`."""

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
