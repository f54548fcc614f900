"""The health check: into service, out of it, and back."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from aiohttp import web

from deploy.emulator.container import Probing, keep_watch, until_ready
from deploy.emulator.endpoint import Endpoint, Status
from deploy.errors import Failed
from tests.deploy.local.servers import Container, Loop
from tests.servers import PATIENCE

QUICK = Probing(window=60, timeout=10, between=0.01, steady=0.01, failures=3)


def test_it_is_ready_with_the_first_200(loop: Loop) -> None:
    container = Container(pings=503)
    with loop.serving(container.app()) as url:

        async def go() -> None:
            waiting = asyncio.ensure_future(until_ready(Endpoint(url, status=Status.CREATING), QUICK))
            while container.pinged < 3:
                await asyncio.sleep(0.005)
            assert not waiting.done()
            container.pings = 200
            await waiting

        asyncio.run(asyncio.wait_for(go(), PATIENCE))


@pytest.mark.parametrize(
    ("pings", "timeout", "said"), [(503, 10, "/ping answers 503"), (0, 0.1, "/ping does not answer within 0.1 s")]
)
def test_a_window_that_passes_fails_the_endpoint(loop: Loop, pings: int, timeout: float, said: str) -> None:
    with loop.serving(Container(pings=pings).app()) as url:
        endpoint = Endpoint(url, status=Status.CREATING)
        with pytest.raises(Failed, match=r"did not pass the ping health check within 0\.2 s") as raised:
            asyncio.run(until_ready(endpoint, Probing(window=0.2, timeout=timeout, between=0.01)))
    assert str(raised.value).endswith(f"Last: {said}.")
    assert endpoint.status is Status.FAILED


def test_no_container_is_waited_for(loop: Loop) -> None:
    with loop.serving(Container().app()) as url:
        pass
    with pytest.raises(Failed, match="/ping cannot be reached"):
        asyncio.run(until_ready(Endpoint(url), Probing(window=0.05, between=0.01)))


def test_three_failed_pings_take_it_out_and_one_good_one_brings_it_back(loop: Loop) -> None:
    container, told = Container(), list[str]()
    with loop.serving(container.app()) as url:
        endpoint = Endpoint(url)

        async def until(healthy: bool) -> None:
            deadline = time.monotonic() + PATIENCE
            while endpoint.healthy is not healthy:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.005)

        async def go() -> None:
            watching = asyncio.ensure_future(keep_watch(endpoint, QUICK, told.append))
            container.pings = 500
            await until(False)
            container.pings = 200
            await until(True)
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

        asyncio.run(go())
    assert told == [
        "unhealthy: /ping answers 500, 3 times in a row. SageMaker would replace the instance.",
        "healthy again",
    ]


def test_a_redirection_is_no_answer(loop: Loop) -> None:
    with loop.serving(Container(pings=200).app()) as url:

        async def elsewhere(request: web.Request) -> web.Response:
            return web.Response(status=302, headers={"Location": f"{url}/ping"})

        app = web.Application()
        app.router.add_get("/ping", elsewhere)
        with loop.serving(app) as moved, pytest.raises(Failed, match="/ping answers 302"):
            asyncio.run(until_ready(Endpoint(moved), Probing(window=0.05, between=0.01)))
