"""Start, read and stop the container's process as SageMaker does, without Docker."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from deploy.emulator.endpoint import Component, Endpoint, Status
from deploy.errors import DeployError, Failed

STOP_SECONDS = 30.0
"""Seconds from SIGTERM to SIGKILL."""
_LOOK = 0.05  # seconds between two checks of the exit status
_TAIL = 20  # lines of the log to show on exit
_LINE = 2**20  # bytes; a longer line of the log is split
_OWN = ("OPTION_", "SERVING_", "SAGEMAKER_", "AWS_CONTAINER_", "HF_MODEL_ID", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN",
        "MODEL_ID", "TENSOR_PARALLEL_DEGREE", "LMI_API_KEY")  # fmt: skip
"""Variables of the shell that would configure the process; a container does not inherit them."""


@dataclass(frozen=True)
class Command:
    """A command to run.

    Args:
        environment: variables to add to those of this process.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Return the address on which the handler's entry point listens."""
        return f"http://127.0.0.1:{self.environment['SAGEMAKER_BIND_TO_PORT']}"


def command(model: str | None, port: int, options: Sequence[str], engine: str | None) -> Command:
    """Return the handler's container entry point with SageMaker's argument and environment.

    Args:
        model: a file, a directory or a hub's name; None: the demo model.
        options: KEY=VALUE, as serving.properties writes them.

    Raises:
        DeployError: the handler is not installed, or an option is invalid.
    """
    settings = settings_of_arguments(options)
    if engine:
        settings["option.llm_engine"] = engine
    return start({**_as_environment(settings), **_model(model)}, port)


def start(variables: Mapping[str, str], port: int) -> Command:
    """Return the handler's container entry point with variables, on a port of this machine.

    Raises:
        DeployError: the handler is not installed.
    """
    if importlib.util.find_spec("handler") is None:
        raise DeployError(
            "no container can be started: the package handler is not installed here",
            "Start one yourself and name it: --container http://127.0.0.1:8080",
        )
    environment = {
        "LMI_CACHE": os.environ.get("LMI_CACHE") or str(_cache()),
        **variables,
        "SAGEMAKER_BIND_TO_PORT": str(port),
        "LMI_HOST": "127.0.0.1",  # a container has its own address, a process has the machine's
    }
    return Command((sys.executable, "-m", "handler.container", "serve"), environment)


def _model(model: str | None) -> dict[str, str]:
    """Return the model's variables: a directory is SageMaker's model data, anything else is named as in an image."""
    path = Path(model).resolve() if model else None
    if path and path.is_dir():
        return {"SAGEMAKER_MODEL_PATH": str(path)}
    nowhere = {"SAGEMAKER_MODEL_PATH": os.devnull}  # not /opt/ml/model of this machine
    return {**nowhere, "OPTION_MODEL_ID": str(path) if path and path.exists() else model or "demo"}


def _cache() -> Path:
    """Return the model cache of `lmi serve`, so that both share the demo model."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmi-handler"


def settings_of_arguments(options: Sequence[str]) -> dict[str, str]:
    """Return the options of the command line by name.

    Raises:
        DeployError: one is not KEY=VALUE.
    """
    pairs = [option.partition("=") for option in options]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise DeployError(f"-o {name}: must be KEY=VALUE, e.g. option.max_rolling_batch_size=8")
    return {name: value for name, _, value in pairs}


def _as_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Convert properties to variables: `option.x` is OPTION_X, other properties are SERVING_X."""
    return {
        f"OPTION_{name.removeprefix('option.')}".upper()
        if name.startswith("option.")
        else f"SERVING_{name}".upper(): value
        for name, value in settings.items()
    }


class Container:
    """One process and its children, in a process group of their own: the terminal's Ctrl-C does not reach them.

    Args:
        show: called with each line of its log.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self.tail: deque[str] = deque(maxlen=_TAIL)

    @property
    def pid(self) -> int:
        assert self._process is not None, "start() comes first"
        return self._process.pid

    async def start(self, command: Command) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}
        self._process = await asyncio.create_subprocess_exec(
            *command.arguments,
            env={**inherited, "PYTHONUNBUFFERED": "1", **command.environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            limit=_LINE,
        )
        self._reader = asyncio.ensure_future(self._read())

    async def wait_for_exit(self) -> Failed:
        """Wait until it exits by itself; return its status and the last lines of its log."""
        assert self._process is not None, "start() comes first"
        status = await self._wait()
        await self._read_all()
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        last = "\n".join(f"  {line}" for line in self.tail)
        return Failed(f"the container {how}", f"Its last lines:\n{last}" if last else "It wrote nothing.")

    async def stop(self, seconds: float = STOP_SECONDS) -> int:
        """Send SIGTERM, then SIGKILL after so many seconds to the whole group. Return the exit status."""
        assert self._process is not None, "start() comes first"
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                await asyncio.wait_for(self._wait(), seconds)
            except asyncio.TimeoutError:
                self._show(f"still running {seconds:g} s after SIGTERM: SIGKILL, as SageMaker does")
        self.kill()
        status = await self._wait()
        await self._read_all()
        self._process._transport.close()  # type: ignore[attr-defined]  # the log's pipe, if it is still held open
        return status

    def kill(self) -> None:
        """Kill the whole group at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _wait(self) -> int:
        """Return the exit status. asyncio's wait() also waits for the log's pipe, which a child may hold for long."""
        assert self._process is not None
        while (status := self._process.returncode) is None:
            await asyncio.sleep(_LOOK)
        return status

    async def _read_all(self) -> None:
        """Read the rest of the log, for a second at most: a child may hold the pipe open."""
        assert self._reader is not None
        await asyncio.wait({self._reader}, timeout=1)

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        lines = self._process.stdout
        while True:
            try:
                line = await lines.readline()
            except ValueError:  # longer than the limit: the rest of the line is dropped
                line = b"(a line too long to show)\n"
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            self.tail.append(text)
            self._show(text)


def _end_with_parent() -> None:
    """Ask the kernel to kill this process with its parent. Runs between fork and exec."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


# -- check the container's health with `GET /ping`, before and while the endpoint is in service ------------------------


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
                raise Failed(f"{text} Last: {wrong}.", "Give it longer with --start-timeout, or check its log.")
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
