"""The server's main loop, which looks once a second: what asks it to stop is heard at once."""

from __future__ import annotations

import asyncio
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from handler.http.security import Access
from handler.http.server import Server, allow_connections


async def _app(scope: object, receive: object, send: object) -> None: ...


async def _left_after(ask: Callable[[Server], object], busy: Callable[[], int] = int) -> float:
    """Seconds from `ask` to the loop's end."""
    server = Server(_app, Access(), keep_alive_timeout=75, drain=lambda: None, busy=busy, give_up=lambda: None)
    server.config.load()
    _slow_down(asyncio.get_running_loop())
    loop = asyncio.ensure_future(server.main_loop())
    await asyncio.sleep(0.3)
    asked = time.monotonic()
    ask(server)
    await asyncio.wait_for(loop, 30)
    return time.monotonic() - asked


def _slow_down(loop: asyncio.AbstractEventLoop) -> None:
    """The server's clock of one second is one of a minute: a test that waits for it fails."""
    call_later: Any = loop.call_later
    loop.call_later = lambda delay, *more: call_later(60 if delay == 1.0 else delay, *more)  # type: ignore[method-assign]


@pytest.mark.parametrize("ask", [Server.stop, lambda server: server.signalled(signal.SIGTERM)])
def test_who_stops_an_idle_server_does_not_wait_for_its_clock(ask: Callable[[Server], object]) -> None:
    asyncio.run(_left_after(ask))


def test_it_leaves_soon_after_the_last_answer() -> None:
    answers = [1, 1, 1]
    left = asyncio.run(
        _left_after(lambda server: server.signalled(signal.SIGTERM), lambda: len(answers) and answers.pop())
    )
    assert left > 0.15, "it looks again after each tenth of a second"


def test_a_server_may_have_more_connections_than_a_shells_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        allow_connections()
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert allowed == (1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16))
