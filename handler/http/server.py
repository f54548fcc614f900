"""Run the server: load the model while a listening socket answers 503, then serve until a signal, and drain."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from handler.config.config import Config
from handler.core import loop
from handler.core.errors import ConfigError, Problem, Problems, Unavailable
from handler.core.values import Task
from handler.engines.process.engine_process import Spec
from handler.engines.process.supervisor import State
from handler.http.app import App, users_functions
from handler.http.inference import headers_by_name, send_answer, send_json
from handler.http.protocol import Protocol
from handler.http.security import OPEN, Access, AllowedHosts
from handler.plugins.functions import Formatters
from handler.protocols.api import ModelState
from handler.protocols.kernel.errors import FRONT_END
from handler.serving.head import request_id
from handler.serving.model import ServedModel
from handler.serving.start import StartTimes, running

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
        """Wake once a second until the server is stopped; uvicorn's own loop wakes ten times a second."""
        due = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._wake = due.set
        while not await self.on_tick(0):
            timer = loop.call_later(1.0 if self._deadline is None else 0.1, due.set)
            await due.wait()
            due.clear()
            timer.cancel()

    def signalled(self, number: signal.Signals) -> None:
        """Drain at the first signal, end what is under way at a second one. The event loop calls it, not a signal
        handler.
        """
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
        """Exit at once: nothing is under way that could be finished."""
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


# -- the model beside the application: while it starts, and while it serves --------------------------------------------


def serve(
    config: Config,
    host: str,
    port: int,
    signals: loop.StopSignals,
    access: Access = OPEN,
    problems: Iterable[Problem] = (),
) -> int:
    """Serve until a signal; returns the exit status.

    Args:
        signals: installed.
        problems: those that are known already; the server does not start with any.

    Raises:
        ConfigError: with all problems: the known ones, those of the address and of model.py; or the model or the
            engine is not available.
    """
    for warning in config.warnings:
        log.info("%s", warning)
    found = Problems(problems)
    with contextlib.ExitStack() as stack:
        with found:
            allow_connections()
            listener = stack.enter_context(contextlib.closing(bind(host, port, config.client_timeout)))
        with found:
            formatters = users_functions(config)
        found.check()
        hosts = AllowedHosts.of(access, host, listener.getsockname()[0])
        return loop.run(_serve(config, listener, formatters, access, hosts, signals))


async def _serve(
    config: Config,
    listener: socket.socket,
    formatters: Formatters,
    access: Access,
    hosts: AllowedHosts,
    signals: loop.StopSignals,
) -> int:
    app, progress, times = StartingApp(config.model_name), Progress(), StartTimes()
    server = Server(
        app,
        access,
        keep_alive_timeout=config.keep_alive_timeout,
        drain=app.drain,
        busy=lambda: app.num_requests,
        give_up=app.give_up,
    )
    signals.listen(server.signalled)
    listener.listen(BACKLOG)  # before it is said: an engine may be ready sooner than uvicorn
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))

    def announce(spec: Spec) -> None:
        times.files_are_here()
        what = f"loading {config.model_id or 'the demo model'} with" if spec.config.model else "starting"
        progress.start(f"{what} {spec.engine}")

    def changed(model: ServedModel, state: State) -> None:
        if state is not State.LOADING:
            progress.stop()
        if state is State.CLOSED:
            server.stop()
        elif state is State.READY and not model.restarts:
            print(f"{CLEAR}{times.ready(model)}", file=sys.stderr)
            print(_greeting(listener, access, model.context.task, formatters), file=sys.stderr, flush=True)

    start = functools.partial(running, config, formatters, signals=True, wait_ready=False)
    make = functools.partial(App, access=access, hosts=hosts, handlers=formatters.handlers)
    hosting = asyncio.ensure_future(_host(start(announce=announce, on_state=changed), app, make, serving))
    try:
        await asyncio.wait({serving, hosting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        progress.stop()
        server.stop()
        if not app.is_open:
            hosting.cancel()  # nobody waits for the model any more
        await asyncio.wait({hosting})
        try:
            await serving
        finally:
            signals.leave()
    if not hosting.cancelled():
        hosting.result()
    return 0


async def _host(
    running_model: contextlib.AbstractAsyncContextManager[ServedModel],
    app: StartingApp,
    make: Callable[[ServedModel], App],
    serving: asyncio.Future[None],
) -> None:
    """Open the application when the model is loaded, and end with the server.

    Raises:
        ConfigError: the model or the engine is not available.
    """
    async with running_model as model:
        app.open(model, make(model))
        await asyncio.wait({serving})
        failure = model.opened.exception() if model.opened.done() else None
        if failure is not None and not model.draining:
            raise failure


_EXAMPLES = {
    Task.GENERATION: '{"inputs":"The capital of France is","parameters":{"max_new_tokens":8}}',
    Task.EMBEDDING: '{"inputs":"The capital of France"}',
    Task.CLASSIFICATION: '{"inputs":"I like you."}',
    Task.TRANSCRIPTION: '{"file":"BASE64"}',
    Task.RERANK: '{"query":"pets","texts":["A cat","A car"]}',
}
"""A body for /invocations of each task."""


def _greeting(listener: socket.socket, access: Access, task: Task, users: Formatters) -> str:
    host, port = listener.getsockname()[:2]
    at = f"{access.scheme}://{'[' + host + ']' if ':' in host else host}:{port}"
    near = at.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")  # all addresses are no address
    known = "${LMI_API_KEY%%,*}" if os.environ.get("LMI_API_KEY") else "KEY"  # its name, never the key itself
    key = f' -H "Authorization: Bearer {known}"' if access.keys else ""
    reader = _reader(users)
    body = f"@body.json  # a body as {reader} reads it" if reader else f"'{_EXAMPLES[task]}'"
    ask = f"curl -s {near}/invocations -H 'Content-Type: application/json'{key} -d {body}"
    return f"listening on {at}; open {'it' if near == at else near} in a browser, or try:\n  {ask}"


def _reader(users: Formatters) -> str:
    """Name the user's function that reads bodies of /invocations in its own form; empty if there is none."""
    if users.input is not None:
        return f"the {users.input.title}"
    if users.handle is not None:
        return "handle of model.py"
    if users.handlers is not None and any((users.handlers.invoke, users.handlers.pre, users.handlers.pre_post_process)):
        return "your custom handler"
    return ""


class StartingApp:
    """The ASGI application of a server: it refuses every request with 503 until `open` names the real one."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._draining = False
        self._model: ServedModel | None = None
        self._app: ASGIApp = self._refuse

    def open(self, model: ServedModel, app: ASGIApp) -> None:
        """Hand all later requests to `app`."""
        self._model, self._app = model, app
        if self._draining:
            model.drain()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return self._app(scope, receive, send)

    @property
    def is_open(self) -> bool:
        """Return whether requests go to the real one."""
        return self._model is not None

    @property
    def num_requests(self) -> int:
        """Requests that are being answered; refusals do not count."""
        return self._model.num_requests if self._model is not None else 0

    def drain(self) -> None:
        self._draining = True
        if self._model is not None:
            self._model.drain()

    def give_up(self) -> None:
        if self._model is not None:
            self._model.give_up()

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["request_id"] = request_id(headers_by_name(scope))
        if scope["path"] == "/ping":
            state = "stopping" if self._draining else "loading"
            value: ModelState = {"status": "Unhealthy", "state": state}
            await send_json(scope, send, 503, value)
        else:
            message = "the server is stopping" if self._draining else f"Model is not ready: {self._model_name}"
            await send_answer(scope, send, FRONT_END.whole(Unavailable(message)))


CLEAR = "\r\033[K" if sys.stderr.isatty() else ""
"""Removes the progress line from a terminal."""


class Progress:
    """The server's present work: seconds count up on a terminal, a log gets a line every ten seconds."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self, what: str) -> None:
        self._task = asyncio.ensure_future(_show(what))

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()


async def _show(what: str) -> None:
    live = sys.stderr.isatty()
    for second in itertools.count():
        if live or second % 10 == 0:
            start, end = ("\r", "") if live else ("", "\n")
            print(f"{start}{what} ... {second} s", end=end, file=sys.stderr, flush=True)
        await asyncio.sleep(1)
