"""Run the ASGI application: bind the socket, run uvicorn, and drain at a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from handler.core.errors import ConfigError
from handler.http.protocol import Protocol
from handler.http.security import Access

log = logging.getLogger("handler.server")

# Connections that may arrive at once. Of a full queue the kernel drops them, and the client tries again a second later.
BACKLOG = 4096
_DRAIN = 20.0  # seconds for answers to finish after SIGTERM: SageMaker kills after 30, and ending takes some of those
_LAST_REQUESTS = 0.1  # seconds for what had come when the last answer went out: each holds at least one look at it


_DESCRIPTORS = 1 << 16  # open files and connections, where the system's hard limit allows so many


def allow_connections() -> None:
    """Raise the process's soft limit of open files: a shell's is often 1,024, and each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def bind(host: str, port: int, client_timeout: float) -> socket.socket:
    """A socket to listen on; the kernel ends a connection whose reader takes nothing for `client_timeout` seconds."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(client_timeout * 1000))
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener


class Server(uvicorn.Server):
    """uvicorn, but SIGTERM first lets the answers under way finish while new requests get a 503.

    Args:
        access: its certificate makes it HTTPS.
        keep_alive_timeout: seconds that a connection may be idle between two requests.
        drain: called once, when the server is asked to stop; new work is refused from then on.
        busy: how many requests are being answered.
        give_up: called when they take too long: what is still under way is told so.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        *,
        keep_alive_timeout: float,
        drain: Callable[[], None],
        busy: Callable[[], int],
        give_up: Callable[[], None],
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                interface="asgi3",  # by default it looks for `async def`
                http=Protocol,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=keep_alive_timeout,  # type: ignore[arg-type]  # it calls loop.call_later with it
                timeout_graceful_shutdown=2,
                ssl_certfile=access.certfile,
                ssl_keyfile=access.keyfile,
            )
        )
        self._drain = drain
        self._busy = busy
        self._give_up = give_up
        self._deadline: float | None = None
        self._wake: Callable[[], object] = int  # until there is a loop to wake

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the handlers alone: `StopSignals` has installed them, and tells `signalled`."""
        yield

    async def main_loop(self) -> None:
        """uvicorn's looks ten times a second, which costs a wake-up each; until somebody stops it, one is enough."""
        due = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._wake = due.set
        while not await self.on_tick(0):
            timer = loop.call_later(1.0 if self._deadline is None else 0.1, due.set)
            await due.wait()
            due.clear()
            timer.cancel()

    def signalled(self, number: signal.Signals) -> None:
        """Drain at the first signal, end what is under way at a second one. The event loop calls it, no handler."""
        if self._deadline is not None:
            self._deadline = time.monotonic()
        else:
            self._deadline = time.monotonic() + _DRAIN
            self._drain()
            busy = self._busy()
            again = "Ctrl-C" if number == signal.SIGINT else "signal"
            waiting = f"; answers to finish: {busy}, within {_DRAIN:g} s; a second {again} ends them at once"
            log.info("%s: stopping%s", number.name, waiting if busy else "")
        self._wake()

    def stop(self) -> None:
        """Leave at once: nothing is under way that could be finished."""
        self.should_exit = True
        self._wake()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept the connections that have come, then no more; answer what they have sent with 503, then close them.

        The kernel resets connections that nobody accepted, and those that are closed with bytes unread.
        """
        await asyncio.sleep(_LAST_REQUESTS)
        for server in self.servers:
            server.close()
        await asyncio.sleep(_LAST_REQUESTS)
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        if self._deadline is not None:
            if time.monotonic() >= self._deadline and self._busy():
                self._give_up()
                self.should_exit = True
            self.should_exit = self.should_exit or not self._busy()
        return await super().on_tick(counter)
