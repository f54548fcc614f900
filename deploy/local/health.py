"""Check the container's health with `GET /ping`, before and while the endpoint is in service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from deploy.errors import Failed
from deploy.local.endpoint import Component, Endpoint, Status

NEVER_HEALTHY = (
    "The primary container for production variant {variant} did not pass the ping health check within {seconds:g} s."
)


@dataclass(frozen=True)
class Probing:
    """Timing of pings, in seconds.

    Args:
        window: time to become ready (ContainerStartupHealthCheckTimeoutInSeconds; SageMaker's default is 8 minutes).
        timeout: timeout of one ping.
        between: pause between pings before the endpoint is in service.
        steady: pause between pings while it is in service.
        failures: consecutive failures after which the container gets no requests. SageMaker's number is undocumented.
    """

    window: float = 480.0
    timeout: float = 2.0
    between: float = 0.25
    steady: float = 5.0
    failures: int = 3


async def ping(session: aiohttp.ClientSession, container: str, seconds: float) -> str:
    """Ping once; return an empty string if it is ready, else its answer."""
    try:
        timeout = aiohttp.ClientTimeout(total=seconds)
        async with session.get(container + "/ping", timeout=timeout, allow_redirects=False) as reply:
            return "" if reply.status == 200 else f"/ping answers {reply.status}"
    except asyncio.TimeoutError:
        return f"/ping does not answer within {seconds:g} s"
    except aiohttp.ClientError as error:
        return f"/ping cannot be reached: {error}"


async def until_ready(endpoint: Endpoint, probing: Probing, name: str = "") -> None:
    """Ping until the first 200.

    Args:
        name: of a component with a container of its own; empty: ping the endpoint's.

    Raises:
        Failed: there was none in time.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + probing.window
    container = endpoint.components[name].container if name else None
    async with _session() as session:
        while wrong := await ping(session, container or endpoint.container, probing.timeout):
            if loop.time() >= deadline:
                endpoint.status = Status.FAILED
                text = NEVER_HEALTHY.format(variant=endpoint.variant, seconds=probing.window)
                text = f"inference component {name}: {text}" if name else text
                raise Failed(f"{text} Last: {wrong}.", "Give it longer with --start-timeout, or see its log.")
            await asyncio.sleep(probing.between)


async def keep_watch(target: Endpoint | Component, probing: Probing, report: Callable[[str], None]) -> None:
    """Ping until the container has ended, and update `healthy`.

    Args:
        target: an endpoint, or a component with a container of its own.
        report: called with a line at each change.
    """
    failures = 0
    container = target.container
    assert container is not None
    async with _session() as session:
        while True:
            await asyncio.sleep(probing.steady)
            wrong = await ping(session, container, probing.timeout)
            if target.ended:
                return
            failures = failures + 1 if wrong else 0
            if wrong and failures == probing.failures:
                target.healthy = False
                report(f"unhealthy: {wrong}, {failures} times in a row. SageMaker would replace the instance.")
            elif not wrong and not target.healthy:
                target.healthy = True
                report("healthy again")


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
