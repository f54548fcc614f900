"""The server. It responds with status 503 while the model loads, serves until a signal arrives, and then drains."""

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
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from handler.config.config import Config
from handler.config.engines import ENGINES
from handler.core import loop
from handler.core.errors import ConfigError, Problem, Problems, Unavailable
from handler.core.package import install
from handler.core.terminal import unescaped
from handler.core.values import Task
from handler.engines.process.engine_process import Spec
from handler.engines.process.supervisor import State
from handler.http.app import App, users_functions
from handler.http.inference import headers_by_name, offers_websocket, send_answer, send_json
from handler.http.protocol import LoopTurns, Protocol
from handler.http.security import OPEN, Access, AllowedHosts, Checks, warning_of
from handler.http.sockets.connection import WebSocket
from handler.http.sockets.routes import EarlySockets, Sockets
from handler.plugins.functions import Formatters
from handler.protocols.api import ModelState
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.errors import FRONT_END
from handler.serving.head import request_id
from handler.serving.model import ServedModel
from handler.serving.start import StartTimes, running

if TYPE_CHECKING:
    from handler.http.grpc import GrpcServer

log = logging.getLogger("handler.server")

# Maximum number of connections that wait to be accepted. If the queue is full, the kernel drops new connections, and
# clients try again after a second.
BACKLOG = 4096
_ACCEPTS = 16  # maximum number of connections that are accepted in an iteration of the event loop
_MAX_DRAINED = 100  # maximum number of connections that are drained in an iteration of the event loop
DRAIN = 20.0  # seconds for running requests to finish after SIGTERM; SageMaker sends SIGKILL after 30
_LAST_REQUESTS = 0.1  # seconds for reading requests that arrived before the last response was sent,
_MAX_LAST_REQUESTS = 20  # repeated at most this many times, as long as more requests are answered


_DESCRIPTORS = 1 << 16  # number of open files and connections to allow, if the system's hard limit is not lower


def allow_connections() -> None:
    """Raise the soft limit on open files, which is often 1,024 in a shell. Each connection counts as an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def bind(host: str, port: int, client_timeout: float) -> socket.socket:
    """Return a bound socket. The kernel closes connections whose client has not read for `client_timeout` seconds.

    Raises:
        ConfigError: the server cannot listen on this address.
    """
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


class HttpServer(uvicorn.Server):
    """A uvicorn server that lets running requests finish after SIGTERM, while new requests get status 503.

    Args:
        app: application, which refuses new requests as soon as the server is stopping.
        access: access settings, whose certificate determines whether the server uses HTTPS.
        keep_alive_timeout: maximum time that a connection may be idle between two requests, in seconds.
    """

    def __init__(self, app: StartingApp, access: Access, *, keep_alive_timeout: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                interface="asgi3",  # by default, uvicorn requires `async def`
                http=functools.partial(Protocol, turns=LoopTurns()),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=keep_alive_timeout,  # type: ignore[arg-type]  # only passed to loop.call_later
                timeout_graceful_shutdown=2,
                ssl_certfile=access.certfile,
                ssl_keyfile=access.keyfile,
            )
        )
        self._app = app
        self._deadline: float | None = None
        self._wake: Callable[[], object] = int  # does nothing until the main loop runs

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers, because `StopSignals` has installed its own, which call `signalled`."""
        yield

    async def main_loop(self) -> None:
        """Tick once per second, and ten times per second while draining, until the server is stopped."""
        due = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._wake = due.set
        while not await self.on_tick(0):
            timer = loop.call_later(1.0 if self._deadline is None else 0.1, due.set)
            await due.wait()
            due.clear()
            timer.cancel()

    def signalled(self, number: signal.Signals) -> None:
        """Start to drain on the first signal, and end running requests on the second signal. This is called by the
        event loop, not from a signal handler.
        """
        if self._deadline is not None:
            self._deadline = time.monotonic()
        else:
            self._deadline = time.monotonic() + DRAIN
            self._app.drain()
            self._drain([*self.server_state.connections])
            busy = self._app.num_requests
            again = "Ctrl-C" if number == signal.SIGINT else "signal"
            waiting = f"; responses to finish: {busy}, within {DRAIN:g} s; a second {again} ends them at once"
            log.info("%s: stopping%s", number.name, waiting if busy else "")
        self._wake()

    def _drain(self, connections: Sequence[object]) -> None:
        """Drain WebSockets, a few in each iteration of the event loop, so that running responses continue."""
        for connection in connections[:_MAX_DRAINED]:
            if isinstance(connection, WebSocket):
                connection.drain()
        if later := connections[_MAX_DRAINED:]:
            asyncio.get_running_loop().call_soon(self._drain, later)

    def stop(self) -> None:
        """Stop without draining. Call this only when no request is running."""
        self.should_exit = True
        self._wake()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept the waiting connections, answer their requests with 503, and close them.

        Otherwise the kernel would reset connections that are not accepted, or that are closed with unread bytes.
        """
        for _ in range(_MAX_LAST_REQUESTS):
            num_answered = self.server_state.total_requests
            await asyncio.sleep(_LAST_REQUESTS)
            if self.server_state.total_requests == num_answered:
                break
        for server in self.servers:
            server.close()
        await asyncio.sleep(_LAST_REQUESTS)
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        if self._deadline is not None:
            if time.monotonic() >= self._deadline and self._app.num_requests:
                self._app.give_up()
                self.should_exit = True
            self.should_exit = self.should_exit or not self._app.num_requests
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
    """Serve until a signal arrives, and return the exit status.

    Args:
        signals: installed signal handlers.
        problems: configuration problems that are already known. The server does not start if there are any.

    Raises:
        ConfigError: the configuration is invalid, the server cannot listen on the address, the user code cannot be
            used, or the model or the engine is not available. The error lists all problems.
    """
    for warning in config.warnings:
        log.info("%s", warning)
    later_problems = Problems(problems)
    with contextlib.ExitStack() as stack:
        with later_problems:
            allow_connections()
            listener = stack.enter_context(contextlib.closing(bind(host, port, config.client_timeout)))
        with later_problems:
            formatters = users_functions(config)
        later_problems.check()
        address = listener.getsockname()[0]
        if warning := warning_of(access, address):
            log.warning("%s", warning)
        hosts = AllowedHosts.of(access, host, address)
        return loop.run(_serve(config, listener, formatters, access, hosts, signals))


async def _serve(
    config: Config,
    listener: socket.socket,
    formatters: Formatters,
    access: Access,
    hosts: AllowedHosts,
    signals: loop.StopSignals,
) -> int:
    app, progress, times = StartingApp(config.name), Progress(), StartTimes()
    sockets = Sockets(config)
    app.open_sockets = EarlySockets(config, sockets, Checks(access, hosts, (), config.owner_header), app.refuse)
    grpc = await _serve_grpc(config, listener.getsockname()[0], app, access) if config.grpc_port else None
    server = HttpServer(app, access, keep_alive_timeout=config.keep_alive_timeout)
    signals.listen(server.signalled)
    listener.listen(BACKLOG)  # uvicorn does so too, but an engine may be ready and announced earlier
    # uvloop accepts one connection per socket in each iteration, so a burst would wait for as many iterations
    listeners = [listener, *(listener.dup() for _ in range(_ACCEPTS - 1))]
    serving = asyncio.ensure_future(server.serve(sockets=listeners))

    def announce(spec: Spec) -> None:
        times.files_are_here()
        model = config.model_id or ("the servers' model" if ENGINES[spec.engine].remote else "the demo model")
        what = f"loading {model} with" if spec.config.model else "starting"
        progress.start(f"{what} {spec.engine}")

    def changed(model: ServedModel, state: State) -> None:
        if state is not State.LOADING:
            progress.stop()
        if state is State.CLOSED:
            server.stop()
        elif state is State.READY and not model.availability.engine.restarts:
            print(CLEAR, end="", file=unescaped(sys.stderr))
            print(times.ready(model), file=sys.stderr)
            print(_greeting(listener, access, model, formatters), file=sys.stderr, flush=True)

    start = functools.partial(running, config, formatters, signals=True, wait_ready=False)
    make = functools.partial(App, access=access, hosts=hosts, handlers=formatters.handlers, sockets=sockets)
    hosting = asyncio.ensure_future(_host(start(announce=announce, on_state=changed), app, make, serving))
    try:
        await asyncio.wait({serving, hosting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        progress.stop()
        server.stop()
        if not app.is_open:
            hosting.cancel()  # the model is not needed any more
        await asyncio.wait({hosting})
        try:
            await serving
        finally:
            signals.leave()
            if grpc is not None:
                await grpc.stop()
    if not hosting.cancelled():
        hosting.result()
    return 0


async def _serve_grpc(config: Config, host: str, app: ASGIApp, access: Access) -> GrpcServer:
    """Start the gRPC server for Triton's clients.

    Raises:
        ConfigError: grpcio is not installed, or the server cannot listen.
    """
    try:
        from handler.http.grpc import GrpcServer
    except ImportError:
        raise ConfigError(f"option.grpc_port needs {install('lmi-handler[triton]')}") from None
    max_calls = config.max_rolling_batch_size + config.job_queue_size
    max_bytes = config.max_request_size
    server = GrpcServer(app, access, patience=config.client_timeout, max_bytes=max_bytes, max_calls=max_calls)
    port = await server.start(host, config.grpc_port)
    log.info("gRPC: listening on %s:%d", host, port)
    return server


async def _host(
    running_model: contextlib.AbstractAsyncContextManager[ServedModel],
    app: StartingApp,
    make: Callable[[ServedModel], App],
    serving: asyncio.Future[None],
) -> None:
    """Run the model until the server ends, and pass all requests to the application of the model.

    Raises:
        ConfigError: the model or the engine is not available.
    """
    async with running_model as model:
        app.open(model, make(model))
        await asyncio.wait({serving})
        failure = model.availability.opened.exception() if model.availability.opened.done() else None
        if failure is not None and not model.availability.draining:
            raise failure


_LMI, _DECISION = "/invocations", "/v1/systemone"
_CHAT = '"messages":[{"role":"user","content":"Name the capital of France."}],"max_tokens":16'
EXAMPLES = {
    Task.GENERATION: {
        _LMI: '{"inputs":"The capital of France is","parameters":{"max_new_tokens":8}}',
        "/v1/chat/completions": f"{{{_CHAT}}}",
        "/v1/responses": '{"input":"Name the capital of France.","max_output_tokens":16}',
        "/v1/messages": f"{{{_CHAT}}}",
        _DECISION: '{"state":"It rains.","questions":{"wet":{"type":"noul","instructions":"Is it wet?"}}}',
        "/generate": '{"inputs":"The capital of France is","parameters":{"max_new_tokens":8}}',
        "/v2/models/{model}/generate": '{"text_input":"The capital of France is","max_tokens":8}',
    },
    Task.EMBEDDING: {_LMI: '{"inputs":"The capital of France"}', "/v1/embeddings": '{"input":"The capital of France"}'},
    Task.CLASSIFICATION: {_LMI: '{"inputs":"I like you."}', "/classify": '{"input":"I like you."}'},
    Task.TRANSCRIPTION: {_LMI: '{"file":"BASE64"}', "/v1/audio/transcriptions": "-F file=@audio.wav"},
    Task.RERANK: {
        _LMI: '{"query":"pets","texts":["A cat","A car"]}',
        "/v1/rerank": '{"query":"pets","documents":["A cat","A car"]}',
    },
}
"""For each task, maps one route of each API to an example body, or to a curl option for a form."""
_OF_CHATS = ("/v1/responses", "/v1/messages", _DECISION)
"""Routes that need a chat template, besides /v1/chat/completions."""
_COMPLETION = "/v1/completions", '{"prompt":"The capital of France is","max_tokens":8}'
"""The example in place of /v1/chat/completions if the model has no chat template."""


def _examples(context: ServerContext) -> Mapping[str, str]:
    """Return the example bodies of `EXAMPLES` that a model does not refuse, by route."""
    examples = EXAMPLES[context.task]
    omitted = {_DECISION} if context.no_labels else set()
    if context.task is Task.GENERATION and context.refuses_chats:
        omitted.update(_OF_CHATS)
        pairs = [_COMPLETION if path == "/v1/chat/completions" else (path, body) for path, body in examples.items()]
        examples = dict(pairs)
    return {path: body for path, body in examples.items() if path not in omitted}


def _greeting(listener: socket.socket, access: Access, model: ServedModel, users: Formatters) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "http" if access.certfile is None else "https"
    at = f"{scheme}://{'[' + host + ']' if ':' in host else host}:{port}"
    near = at.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")  # 0.0.0.0 is not for clients
    key, requests = _key_header(access), ""
    for path, body in _examples(model.context).items():
        data = f"-d '{body}'" if body.startswith("{") else body
        if path == _LMI and _reader(users):
            data = f"-H 'Content-Type: application/json' -d @body.json  # in the format that {_reader(users)} reads"
        url = near + path.format(model=quote(model.config.name, safe=""))
        requests += f"\n  curl -s {url}{key} {data}"
    return f"listening on {at}; open {'it' if near == at else near} in a browser, or try:{requests}"


def _key_header(access: Access) -> str:
    """Return the curl argument for the API key, or "" if no key is needed. The key itself must never be printed."""
    key = "${LMI_API_KEY%%,*}" if os.environ.get("LMI_API_KEY") else "KEY"
    return f' -H "Authorization: Bearer {key}"' if access.keys else ""


def _reader(users: Formatters) -> str:
    """Return the name of the user function that reads /invocations bodies, or "" if there is none."""
    if users.input is not None:
        return f"the {users.input.title}"
    if users.handle is not None:
        return "handle of model.py"
    if users.handlers is not None and any((users.handlers.invoke, users.handlers.pre, users.handlers.pre_post_process)):
        return "your custom handler"
    return ""


class StartingApp:
    """An ASGI application that responds to all requests with 503 until `open` sets the real application.

    Attributes:
        open_sockets: application that opens WebSockets until then, or None to refuse them too.
    """

    def __init__(self, model_name: str) -> None:
        self.open_sockets: ASGIApp | None = None
        self._model_name = model_name
        self._draining = False
        self._model: ServedModel | None = None
        self._app: ASGIApp = self._start

    def open(self, model: ServedModel, app: ASGIApp) -> None:
        """Pass all later requests to `app`."""
        self._model, self._app = model, app
        if self._draining:
            model.drain()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return self._app(scope, receive, send)

    @property
    def is_open(self) -> bool:
        """Return whether requests are passed to the real application."""
        return self._model is not None

    @property
    def num_requests(self) -> int:
        """Return the number of running requests, not counting those that get status 503."""
        return self._model.num_requests if self._model is not None else 0

    def drain(self) -> None:
        self._draining = True
        if self._model is not None:
            self._model.drain()

    def give_up(self) -> None:
        if self._model is not None:
            self._model.give_up()

    async def _start(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["headers_by_name"] = headers_by_name(scope)
        if self.open_sockets is None or self._draining or not offers_websocket(scope):
            return await self.refuse(scope, receive, send)
        await self.open_sockets(scope, receive, send)

    async def refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond with status 503."""
        scope["request_id"] = request_id(scope["headers_by_name"])
        if scope["path"] == "/ping":
            state = "stopping" if self._draining else "loading"
            value: ModelState = {"status": "Unhealthy", "state": state}
            await send_json(scope, send, 503, value)
        else:
            message = "the server is stopping" if self._draining else f"Model is not ready: {self._model_name}"
            await send_answer(scope, send, FRONT_END.whole(Unavailable(message)))


CLEAR = "\r\033[K" if sys.stderr.isatty() else ""
"""Characters that erase the progress line on a terminal."""


class Progress:
    """A progress line during startup. A terminal shows the elapsed seconds, and a log gets a line every 10 s."""

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
            print("\r" if live else "", end="", file=unescaped(sys.stderr))
            print(f"{what} ... {second} s", end="" if live else "\n", file=sys.stderr, flush=True)
        await asyncio.sleep(1)
