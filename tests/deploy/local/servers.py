"""A container that does as each request says, the emulators before it, and `lmi deploy local` as a process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import aiohttp
import boto3
from aiohttp import web
from botocore.config import Config

from deploy.emulator.endpoint import Endpoint
from deploy.emulator.runtime import RuntimeEmulator
from tests.environment import clean_environment
from tests.install import environment
from tests.servers import PATIENCE, LiveServer, wait_for

T = TypeVar("T")
ACCOUNT = "000000000000"
_HELD_AFTER = 5  # lines: of server-sent events two, and a chat's first has no text


class Loop:
    """An event loop on a thread, where servers of a test live."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(PATIENCE)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @contextlib.contextmanager
    def serving(self, app: web.Application, *, cancel: bool = True) -> Iterator[str]:
        async def start() -> web.AppRunner:
            runner = web.AppRunner(app, handler_cancellation=cancel, shutdown_timeout=0.1, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            return runner

        runner = self.run(start())
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            self.run(runner.cleanup())


@dataclass
class Container:
    """What the scripted container has seen. A request's body: `{"do": name, ...}`, with the names in `_SCRIPTS`."""

    url: str = ""
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    pings: int = 200
    """The status that /ping answers; 0: it never does."""
    pinged: int = 0
    may_go_on: threading.Event = field(default_factory=threading.Event)
    """`stream` waits for it after the first piece, `wait` before it answers."""
    gone: threading.Event = field(default_factory=threading.Event)
    """A request was given up while it was answered."""
    active: threading.Event = field(default_factory=threading.Event)
    """A request is waiting for `may_go_on`."""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/ping", self._ping)
        app.router.add_post("/{path:.*}", self._post)
        return app

    async def _ping(self, request: web.Request) -> web.Response:
        self.pinged += 1
        if not self.pings:
            await asyncio.sleep(60)
        return web.Response(status=self.pings)

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.paths.append(request.path)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.bodies.append(body)
        asked = json.loads(body) if body[:1] == b"{" else {}
        try:
            return await _SCRIPTS[asked.get("do", "echo")](self, request, asked)
        except asyncio.CancelledError:
            self.gone.set()
            raise

    async def wait(self) -> None:
        self.active.set()
        while not self.may_go_on.is_set():
            await asyncio.sleep(0.005)


async def _echo(container: Container, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
    headers = asked.get("headers", {"Content-Type": "application/json"})
    return web.Response(status=asked.get("status", 200), body=asked.get("text", "ok").encode(), headers=headers)


async def _wait(container: Container, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
    await container.wait()
    return web.Response(text="late")


async def _stream(container: Container, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
    """`pieces` as hexadecimal; after the first it waits; `end`: how, if not well."""
    answer = web.StreamResponse(
        status=asked.get("status", 200), headers=asked.get("headers", {"Content-Type": "application/jsonlines"})
    )
    answer.enable_chunked_encoding()
    await answer.prepare(request)
    for index, piece in enumerate(asked["pieces"]):
        await answer.write(bytes.fromhex(piece))
        if not index:
            await container.wait()
    if asked.get("end") == "cut":
        assert request.transport is not None
        request.transport.abort()
        return answer
    if asked.get("end") == "stall":
        await asyncio.sleep(60)
    await answer.write_eof()
    return answer


async def _hang_up(container: Container, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


_SCRIPTS: dict[str, Callable[[Container, web.Request, dict[str, Any]], Coroutine[Any, Any, web.StreamResponse]]] = {
    "echo": _echo,
    "wait": _wait,
    "stream": _stream,
    "hang up": _hang_up,
}


@dataclass
class Relay:
    """Stands before a container, and holds each answer after a few lines until it may go on."""

    container: str
    may_go_on: threading.Event = field(default_factory=threading.Event)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/{path:.*}", self._post)
        return app

    async def _post(self, request: web.Request) -> web.StreamResponse:
        url, body, headers = self.container + request.path_qs, await request.read(), request.headers
        async with aiohttp.ClientSession() as session, session.post(url, data=body, headers=headers) as found:
            answer = web.StreamResponse(status=found.status, headers={"Content-Type": found.headers["Content-Type"]})
            await answer.prepare(request)
            lines = 0
            async for line in found.content:
                await answer.write(line)
                lines += 1
                while lines == _HELD_AFTER and not self.may_go_on.is_set():
                    await asyncio.sleep(0.005)
            await answer.write_eof()
            return answer


def client(url: str, *, read_timeout: float = PATIENCE, region: str = "us-east-1", **more: Any) -> Any:
    """Stock boto3, as a user has it, but for its retries."""
    config = Config(read_timeout=read_timeout, retries={"total_max_attempts": 1}, **more)
    return boto3.client("sagemaker-runtime", region_name=region, endpoint_url=url, aws_access_key_id="AKIDEXAMPLE",
                        aws_secret_access_key="secret", config=config)  # fmt: skip


@dataclass
class Local:
    """An emulator before a scripted container."""

    container: Container
    endpoint: Endpoint
    url: str
    runtime: Any

    def invoke(self, asked: Any, **more: Any) -> Any:
        return self.runtime.invoke_endpoint(**{"EndpointName": "local", "Body": _body(asked), **more})

    def stream(self, asked: Any, **more: Any) -> Any:
        return self.runtime.invoke_endpoint_with_response_stream(
            **{"EndpointName": "local", "Body": _body(asked), **more}
        )


def _body(asked: Any) -> bytes:
    return asked if isinstance(asked, bytes) else json.dumps(asked).encode()


@contextlib.contextmanager
def local(loop: Loop, at: str | None = None, **endpoint: Any) -> Iterator[Local]:
    """An emulator; other arguments are those of `Endpoint`.

    Args:
        at: where the emulator takes the container to be, if not where it is.
    """
    container = Container()
    with loop.serving(container.app()) as container.url:
        served = Endpoint(at or container.url, **endpoint)
        with loop.serving(RuntimeEmulator(served).app()) as url:
            with contextlib.closing(client(url)) as runtime:
                yield Local(container, served, url, runtime)
            container.may_go_on.set()


class LocalProcess:
    """What it has written so far is in `out` (standard output) and `log` (standard error).

    Args:
        directory: where it runs, if not here.
        variables: more variables of its environment.
    """

    def __init__(
        self, *arguments: str, directory: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deploy", "local", "--port", "0", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=directory,
            env={**clean_environment(), **(variables or {})},
        )  # fmt: skip
        self._lines: dict[str, list[str]] = {"out": [], "log": []}
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._pipes = {"out": self.process.stdout, "log": self.process.stderr}
        self._readers = [
            threading.Thread(target=self._read, args=(name, pipe), daemon=True) for name, pipe in self._pipes.items()
        ]
        for reader in self._readers:
            reader.start()

    @property
    def out(self) -> str:
        return "".join(self._lines["out"])

    @property
    def log(self) -> str:
        return "".join(self._lines["log"])

    @property
    def url(self) -> str:
        found = re.search(r"InService: (http://\S+)", self.out)
        assert found is not None, self.log
        return found[1]

    def container_pid(self) -> int:
        children = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True)
        return int(children.stdout.split()[0])

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.log
            return "Body=" in self.out

        wait_for(ready, PATIENCE, "the endpoint is not in service")

    def wait_said(self, text: str) -> None:
        wait_for(lambda: text in self.log, PATIENCE, f"it does not say {text!r}")

    def end(self, number: int = signal.SIGINT) -> int:
        """A signal, and the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        self.process.wait(PATIENCE)
        for reader in self._readers:
            reader.join(PATIENCE)
        for pipe in self._pipes.values():
            pipe.close()
        return self.process.returncode

    def _read(self, name: str, pipe: IO[str]) -> None:
        for line in pipe:
            self._lines[name].append(line)


@contextlib.contextmanager
def local_process(
    *arguments: str, directory: Path | None = None, variables: Mapping[str, str] | None = None
) -> Iterator[LocalProcess]:
    """In service (see `LocalProcess`)."""
    local = LocalProcess(*arguments, directory=directory, variables=variables)
    try:
        local.wait_ready()
        yield local
    finally:
        local.end()


def aws_variables(url: str) -> dict[str, str]:
    """What a script needs to take it for AWS."""
    return {
        "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": url,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "ENDPOINT_NAME": "local",
    }


OTHER = "Endpoint other of account 000000000000 not found."
"""What SageMaker says of one that there is not."""


@contextlib.contextmanager
def emulated(server: LiveServer, **endpoint: Any) -> Iterator[str]:
    """The runtime's URL; the endpoint is called `local`."""
    server.wait_ready()
    loop = Loop()
    try:
        with loop.serving(RuntimeEmulator(Endpoint(server.url, **endpoint)).app()) as url:
            yield url
    finally:
        loop.close()


_NOWHERE = "http://127.0.0.1:9"
_END = "Ctrl-C stops the emulation"


@contextlib.contextmanager
def rehearsal(directory: Path, *arguments: str) -> Iterator[tuple[LocalProcess, dict[str, str]]]:
    """Start it; yield it with the variables that it tells to export."""
    local = LocalProcess("--aws", *arguments, directory=directory)
    try:

        def ready() -> bool:
            assert local.process.poll() is None, local.log
            return _END in local.out

        wait_for(ready, PATIENCE, "the rehearsal does not start")
        lines = re.findall(r"^export (\w+)=(.*)$", local.out, re.MULTILINE)
        yield local, {name: shlex.split(value)[0] for name, value in lines}
    finally:
        local.end()


@contextlib.contextmanager
def for_readers(directory: Path, *arguments: str) -> Iterator[dict[str, str]]:
    """Start a rehearsal, and install AWS's command line beside it; yield a reader's variables."""
    commands = environment(directory / "awscli", "awscli").parent
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:{commands}"
    with rehearsal(directory, *arguments) as (_, variables):
        yield {
            **variables,
            "PATH": path,
            "AWS_PAGER": "",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "HF_HUB_OFFLINE": "1",
            "HTTPS_PROXY": _NOWHERE,
        }
