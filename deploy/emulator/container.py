"""Run the container process without Docker. It is started, health-checked and stopped as on SageMaker."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from deploy.emulator.endpoint import Endpoint, EndpointComponent, Status
from deploy.errors import DeployError, Failed
from deploy.s3.archive import variable_of_key
from handler.config.options.names import KEY_VARIABLES

STOP_SECONDS = 30.0
"""Seconds between SIGTERM and SIGKILL."""
_LOOK = 0.05  # seconds between two checks of the exit status
_TAIL = 20  # number of log lines to show on exit
_LINE = 2**20  # bytes; longer log lines are dropped
NOT_INHERITED = ("OPTION_", "SERVING_", "SAGEMAKER_", "AWS_CONTAINER_", "HF_MODEL_ID", "HF_TOKEN",
                  "HUGGING_FACE_HUB_TOKEN", "MODEL_ID", "TENSOR_PARALLEL_DEGREE", *KEY_VARIABLES)  # fmt: skip
"""Prefixes of environment variables that the process does not inherit, because they would configure the server."""


@dataclass(frozen=True)
class Command:
    """A command that starts a container process.

    Args:
        environment: environment variables to set in addition to the inherited variables.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Return the URL on which the container listens."""
        return f"http://127.0.0.1:{self.environment['SAGEMAKER_BIND_TO_PORT']}"


def command(model: str | None, port: int, options: Sequence[str], engine: str | None) -> Command:
    """Return the command that runs the handler's container entry point as SageMaker does.

    Args:
        model: a file, a directory or a model name on the hub, or None for the demo model.
        options: options as KEY=VALUE, with the keys of serving.properties.

    Raises:
        DeployError: the handler is not installed, or an option is not KEY=VALUE.
    """
    settings = settings_of_arguments(options)
    if engine:
        settings["option.llm_engine"] = engine
    variables = {variable_of_key(key): value for key, value in settings.items()}
    return start({**variables, **_model(model)}, port)


def start(variables: Mapping[str, str], port: int) -> Command:
    """Return the command that runs the handler's container entry point with `variables` on a local port.

    Raises:
        DeployError: the handler is not installed.
    """
    if importlib.util.find_spec("handler") is None:
        raise DeployError(
            "cannot start a container: the package handler is not installed here",
            "Start a container yourself, and pass its URL: --container http://127.0.0.1:8080",
        )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmi-handler"  # as in `lmi serve`
    environment = {
        "LMI_CACHE": os.environ.get("LMI_CACHE") or str(cache),
        **variables,
        "SAGEMAKER_BIND_TO_PORT": str(port),
        "LMI_HOST": "127.0.0.1",  # without a container, 0.0.0.0 would be reachable from other machines
    }
    return Command((sys.executable, "-m", "handler.container", "serve"), environment)


def _model(model: str | None) -> dict[str, str]:
    """Return the model's environment variables. A directory is passed as model data, any other model as `model_id`."""
    path = Path(model).resolve() if model else None
    if path and path.is_dir():
        return {"SAGEMAKER_MODEL_PATH": str(path)}
    nowhere = {"SAGEMAKER_MODEL_PATH": os.devnull}  # so that this machine's /opt/ml/model is not used
    return {**nowhere, "OPTION_MODEL_ID": str(path) if path and path.exists() else model or "demo"}


def settings_of_arguments(options: Sequence[str]) -> dict[str, str]:
    """Return the values of the KEY=VALUE options on the command line, by key.

    Raises:
        DeployError: an option is not KEY=VALUE.
    """
    pairs = [option.partition("=") for option in options]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise DeployError(f"-o {name}: must be KEY=VALUE, e.g. option.max_rolling_batch_size=8")
    return {name: value for name, _, value in pairs}


class ContainerProcess:
    """The container process and its children, in their own session so that Ctrl-C does not interrupt them.

    Args:
        show: callback for each line of the process log.
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
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)}
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
        """Wait until the process exits by itself, and return an error with its exit status and its last log lines."""
        assert self._process is not None, "start() comes first"
        status = await self._wait()
        await self._read_all()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        last = "\n".join(f"  {line}" for line in self.tail)
        return Failed(f"the container {how}", f"Its last log lines:\n{last}" if last else "It logged nothing.")

    async def stop(self, seconds: float = STOP_SECONDS) -> int:
        """Stop the process, and return its exit status.

        The process receives SIGTERM. After it exits, or after `seconds`, the whole process group receives SIGKILL.
        """
        assert self._process is not None, "start() comes first"
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            deadline = time.monotonic() + seconds  # until Python 3.12, `asyncio.wait_for` may ignore a cancellation
            while self._process.returncode is None and time.monotonic() < deadline:
                await asyncio.sleep(_LOOK)
            if self._process.returncode is None:
                self._show(f"still running {seconds:g} s after SIGTERM, so it is killed with SIGKILL, as on SageMaker")
        self.kill()
        status = await self._wait()
        await self._read_all()
        self._process._transport.close()  # type: ignore[attr-defined]  # a child may still keep the log's pipe open
        return status

    def kill(self) -> None:
        """Kill the process group immediately."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _wait(self) -> int:
        """Wait until the process exits, and return its exit status.

        asyncio's own `wait()` would also wait until every child that inherited the log pipe has exited.
        """
        assert self._process is not None
        while (status := self._process.returncode) is None:
            await asyncio.sleep(_LOOK)
        return status

    async def _read_all(self) -> None:
        """Read the rest of the log, for at most one second because a child may keep the pipe open."""
        assert self._reader is not None
        await asyncio.wait({self._reader}, timeout=1)

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        lines = self._process.stdout
        while True:
            try:
                line = await lines.readline()
            except ValueError:  # the line exceeds the limit, and its content is dropped
                line = b"(a line too long to show)\n"
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            self.tail.append(text)
            self._show(text)


def _end_with_parent() -> None:
    """Ask the kernel to terminate this process when its parent exits. Runs between fork and exec."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


# -- health checks of the container with `GET /ping`, before and while the endpoint is in service ----------------------


NEVER_HEALTHY = (
    "The primary container for production variant {variant} did not pass the ping health check within {seconds:g} s."
)


@dataclass(frozen=True)
class Probing:
    """Timing of health checks. Times are in seconds.

    Args:
        window: time for the container to become ready (ContainerStartupHealthCheckTimeoutInSeconds). SageMaker's
            default is 8 minutes.
        timeout: timeout of one ping.
        between: pause between pings before the endpoint is in service.
        steady: pause between pings while the endpoint is in service.
        failures: number of consecutive failed pings after which the container gets no requests. SageMaker does not
            document this number.
    """

    window: float = 480.0
    timeout: float = 2.0
    between: float = 0.25
    steady: float = 5.0
    failures: int = 3


async def ping(session: aiohttp.ClientSession, container: str, seconds: float) -> str:
    """Ping the container once. Return an empty string if it is ready, or a description of the problem."""
    try:
        timeout = aiohttp.ClientTimeout(total=seconds)
        async with session.get(container + "/ping", timeout=timeout, allow_redirects=False) as reply:
            return "" if reply.status == 200 else f"/ping responds with status {reply.status}"
    except asyncio.TimeoutError:
        return f"/ping does not respond within {seconds:g} s"
    except aiohttp.ClientError as error:
        return f"/ping cannot be reached: {error}"


async def until_ready(endpoint: Endpoint, probing: Probing, name: str = "") -> None:
    """Ping the container until it responds with status 200.

    Args:
        name: name of a component with its own container, or "" to ping the endpoint's container.

    Raises:
        Failed: the container did not become ready within `probing.window` seconds.
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
                raise Failed(f"{text} Last ping: {wrong}.", "Raise --start-timeout, or check the container's log.")
            await asyncio.sleep(probing.between)


async def keep_watch(target: Endpoint | EndpointComponent, probing: Probing, report: Callable[[str], None]) -> None:
    """Ping the container until it exits, and update `target.status`.

    Args:
        target: an endpoint, or a component with its own container.
        report: callback for a line of text whenever `target.status` changes.
    """
    failures = 0
    container = target.container
    assert container is not None
    async with _session() as session:
        while True:
            await asyncio.sleep(probing.steady)
            wrong = await ping(session, container, probing.timeout)
            if target.status is Status.EXITED:
                return
            failures = failures + 1 if wrong else 0
            if wrong and failures == probing.failures:
                target.status = Status.UNHEALTHY
                report(f"unhealthy: {wrong} ({failures} times in a row). SageMaker would replace the instance.")
            elif not wrong and not target.status.is_healthy:
                target.status = Status.IN_SERVICE
                report("healthy again")


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
