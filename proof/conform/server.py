"""The server under test: sends requests in the dialect of a profile, and starts and stops a process or container."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import ssl
import sys
import time
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from handler.core.errors import ConfigError
from proof.bench.client import refused_key
from proof.conform.dialects import AT_INVOCATIONS, OF_PROFILE, Body, GenerationApi, merge, piece_of, text_of
from proof.conform.exchange import RawConnection, Response, connect, excerpt
from proof.conform.rule import Failed, skip

_ENGINES = ("docker", "podman")
_INSPECT = ("container", "inspect", "--format", "{{.State.Running}}")
_FAREWELL = 10.0
"""Number of seconds from SIGTERM to SIGKILL for a command that is still running after the last rule."""


@dataclass
class Start:
    """Observations while the server started.

    Attributes:
        first: the response to the first request after /ping had returned 200.
        early: the response to a request while /ping reported that the server was not ready, or None if the port was
            closed until the server was ready.
    """

    first: Response
    early: Response | None = None


@dataclass
class Stop:
    """Observations after SIGTERM.

    Attributes:
        running: the response of the stream that was running.
        later: the responses to requests that were sent after the signal.
        seconds: the seconds from the signal to the end of the process, or None if it did not end.
    """

    running: Response
    later: list[Response] = field(default_factory=list)
    seconds: float | None = None


class Lifetime(ABC):
    """The process or container of a server. It is stopped in the same way as on SageMaker.

    Attributes:
        ours: whether `start` starts the server; otherwise, the server must already be running.
        started, stopped: the observations, or None before the server was started or stopped.
    """

    ours = False
    started: Start | None = None
    stopped: Stop | None = None

    @abstractmethod
    async def start(self) -> None:
        """Start the server, or check that it is running if `ours` is false."""

    @abstractmethod
    async def has_ended(self) -> bool:
        """Return whether the server has ended."""

    @abstractmethod
    async def terminate(self) -> None:
        """Send SIGTERM."""

    @abstractmethod
    async def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for the server to end, and return whether it has ended."""

    @abstractmethod
    async def kill(self) -> None:
        """Kill the server if `start` started it."""


class Command(Lifetime):
    """A server that is started by a command, in its own process group."""

    ours = True

    def __init__(self, command: str) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"lmi conform: --command {command!r}: {error}") from None
        if not self._words:
            raise ConfigError("lmi conform: --command must not be empty")
        self._process: asyncio.subprocess.Process | None = None
        self._terminating = False

    async def start(self) -> None:
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._words, stdin=asyncio.subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True
            )
        except OSError as error:
            raise ConfigError(f"lmi conform: {self._words[0]} cannot be run: {error.strerror}") from None

    async def has_ended(self) -> bool:
        return self._process is not None and self._process.returncode is not None

    async def terminate(self) -> None:
        assert self._process is not None
        self._terminating = True
        if not await self.has_ended():
            self._process.terminate()  # only the first process of the group, as Docker does

    async def wait(self, seconds: float) -> bool:
        assert self._process is not None
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._process.wait(), max(seconds, 0.01))
        return await self.has_ended()

    async def kill(self) -> None:
        """End the process group. SIGTERM comes first, because `docker run` stops its container only on SIGTERM."""
        if self._process is None:
            return
        if not self._terminating:
            await self.terminate()
            await self.wait(_FAREWELL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # also its children
        await self._process.wait()


class ContainerRun(Lifetime):
    """A running container of Docker or Podman, identified by its name or ID."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._engine = ""

    async def start(self) -> None:
        """Check that Docker or Podman is running the container.

        Raises:
            ConfigError: neither of them has the container, or it is not running.
        """
        lines = []
        for engine in filter(shutil.which, _ENGINES):
            status, words = await _call(engine, *_INSPECT, self._name)
            if not status:
                self._engine = engine
                break
            lines.append(f"{engine}: {words}")
        else:
            reason = "; ".join(lines) or f"{' or '.join(_ENGINES)} is required"
            raise ConfigError(f"lmi conform: --container {self._name}: {reason}")
        if words != "true":
            raise ConfigError(f"lmi conform: --container {self._name}: the container is not running; start it first")

    async def has_ended(self) -> bool:
        """Return whether the container has ended or was removed."""
        status, words = await _call(self._engine, *_INSPECT, self._name)
        return status != 0 or words != "true"

    async def terminate(self) -> None:
        status, words = await _call(self._engine, "kill", "--signal", "TERM", self._name)
        if status and not await self.has_ended():
            skip(f"{self._engine} kill: {words}")

    async def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not (ended := await self.has_ended()) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        return ended

    async def kill(self) -> None:
        """Do nothing, because the container was not started here."""


async def _call(*words: str) -> tuple[int, str]:
    """Run a program, and return its status, and the last line of its output, or of its errors if it failed."""
    process = await asyncio.create_subprocess_exec(
        *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, errors = await process.communicate()
    assert process.returncode is not None
    lines = (errors if process.returncode else out).decode(errors="replace").split("\n")
    return process.returncode, next((line.strip() for line in reversed(lines) if line.strip()), "")


PROMPT = "one two three four five six seven eight"
_LONGEST = 4096
"""Maximum number of tokens in a stream that a rule requests."""

_WITHOUT_KEY = ("/ping",)
"""Paths at which a server must not require a key, because SageMaker sends none. Status 401 there is a finding."""

_SHORTEST = 0.5
"""Minimum duration, in seconds, of a response that a rule observes while it is generated."""


@dataclass(frozen=True)
class Limits:
    """The limits for a server. Times are in seconds.

    Attributes:
        response: the limit for a response to a request of a rule.
        whole: the limit for a non-streaming response.
        ping: the limit for /ping.
        connect: the limit for accepting a connection.
        stop: the time from SIGTERM to SIGKILL.
        abandoned: the time within which the engine must stop after a client has disconnected.
        patience: the time to wait for abandoned responses to end if the engine does not stop.
        long: the duration of a stream that must not end by itself.
        payload: the maximum body size, in bytes.
    """

    response: float = 60.0
    whole: float = 60.0
    ping: float = 2.0
    connect: float = 0.25
    stop: float = 30.0
    abandoned: float = 5.0
    patience: float = 100.0
    long: float = 15.0
    payload: int = 25_000_000


@dataclass(frozen=True)
class Asking:
    """The arguments of `lmi conform` that apply to requests.

    Attributes:
        key: the API key, or "" if the server needs no key.
        model: the model name in requests, or "" to look it up.
        adapter: NAME=DIRECTORY of a LoRA adapter on the machine of the server, or "".
        metrics: the path of the server metrics.
        slow: whether to check rules that take minutes.
    """

    url: str
    key: str = ""
    model: str = ""
    adapter: str = ""
    metrics: str = "/metrics"
    slow: bool = False
    limits: Limits = Limits()


class Server:
    """The server under test, in the dialect of one profile.

    Attributes:
        last: the last response that `ask` has received, or None if it has not received any.
    """

    def __init__(self, asking: Asking, profile: str, lifetime: Lifetime | None = None) -> None:
        self.asking = asking
        self.limits = asking.limits
        self.profile = profile
        self.lifetime = lifetime
        self._where = urllib.parse.urlsplit(asking.url)
        self._model = asking.model
        self._dialect = OF_PROFILE.get(profile)
        self._rate = 0.0
        self._looking_up = asyncio.Lock()
        self.last: Response | None = None

    # -- plain requests ------------------------------------------------------------------------------------------

    async def ask(
        self,
        method: str,
        path: str,
        body: Body | bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        keyed: bool = True,
    ) -> Response:
        """Send one request on a new connection.

        Args:
            body: an object to be sent as JSON, or bytes to be sent unchanged.
            headers: additional headers, which may replace content-type, authorization and x-api-key.
            keyed: whether to send the API key.

        Raises:
            ConfigError: the server requires a key, and none was given.
        """
        request, label = self._request(method, path, body, headers or {}, keyed)
        is_default, timeout = timeout is None, timeout or self.limits.response
        start = time.monotonic()
        try:
            connection = await connect(self.asking.url, timeout)
        except (OSError, ssl.SSLError, asyncio.TimeoutError) as error:
            late = isinstance(error, asyncio.TimeoutError)
            reason = "connection timeout" if late else "refused"
            return Response(label, failure=reason, seconds=time.monotonic() - start, late=late and is_default)
        try:
            response = await connection.send(request, label, timeout)
            self.last = replace(response, late=is_default and response.failure == "timeout")
        finally:
            connection.close()
        if response.status == 401 and keyed and not self.asking.key and path not in _WITHOUT_KEY:
            raise refused_key(self.asking.url, "")  # all further results would be about the missing key
        return self.last

    async def get(self, path: str, **more: Any) -> Response:
        return await self.ask("GET", path, **more)

    async def post(self, path: str, body: Body | bytes, **more: Any) -> Response:
        return await self.ask("POST", path, body, **more)

    async def metrics(self) -> Response:
        return await self.get(self.asking.metrics)

    @contextlib.asynccontextmanager
    async def asking_for(
        self, path: str, body: Body, timeout: float | None = None
    ) -> AsyncIterator[tuple[RawConnection, asyncio.Task[Response]]]:
        """Send a request, and yield its connection, which is closed at the end, and the task that awaits its response.

        Args:
            timeout: the time limit of the response, in seconds. The default is `limits.response` plus `limits.long`.
        """
        request, label = self._request("POST", path, body, {}, True)
        connection = await connect(self.asking.url, self.limits.response)
        task = asyncio.ensure_future(
            connection.send(request, label, timeout or self.limits.response + self.limits.long)
        )
        try:
            yield connection, task
        finally:
            connection.close()
            await asyncio.wait([task])

    def _request(
        self, method: str, path: str, body: Body | bytes | None, headers: Mapping[str, str], keyed: bool
    ) -> tuple[bytes, str]:
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        every = {"host": self._where.netloc}
        if data or method == "POST":
            every["content-length"] = str(len(data))
        if body is not None:
            every["content-type"] = "application/json"
        if keyed and self.asking.key:
            every |= {"authorization": f"Bearer {self.asking.key}", "x-api-key": self.asking.key}
        every |= {name.lower(): value for name, value in headers.items()}
        path = self._where.path.rstrip("/") + path
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in every.items())]
        keys = "".join(f" {name}: {value}" for name, value in headers.items() if "key" not in name.lower())
        label = " ".join(part for part in (f"{method} {path}{keys if keyed else ''}", excerpt(data)) if part)
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace") + data, label

    async def check_key(self) -> None:
        """Check that the server accepts the key, if one was given, on the route that most servers protect.

        Raises:
            ConfigError: the server responds with status 401.
        """
        if (await self.get("/v1/models")).status == 401:
            raise refused_key(self.asking.url, self.asking.key)

    # -- in the profile's dialect --------------------------------------------------------------------------------

    async def dialect(self) -> GenerationApi:
        """Return the dialect of the profile or, for SageMaker, the first that the server accepts at `/invocations`.

        Raises:
            NotAsked: the server accepts none of the dialects.
            ConfigError: the server does not accept the API key.
            Failed: the key does not permit the request.
        """
        async with self._looking_up:  # concurrent requests need it too
            if self._dialect is None:
                self._dialect = await self._find_dialect()
        return self._dialect

    async def _find_dialect(self) -> GenerationApi:
        for dialect in AT_INVOCATIONS:
            body = await self.with_model(dialect.body(PROMPT, 2, False))
            response = await self.post(await self.filled(dialect.path), body)
            if response.ok:  # TGI alone returns the prompt too, and refuses streams by an event
                in_stream = dialect.prompt == "inputs" and (text_of(response.value) or "").startswith(PROMPT)
                return replace(dialect, refuses_in_stream=in_stream)
            if response.status == 401:
                raise refused_key(self.asking.url, self.asking.key)
        if response.status == 403 and self.asking.key:
            raise Failed("a response to a request with the key", response)
        skip("/invocations accepts neither inputs, nor messages, nor prompt")

    async def model(self) -> str:
        """Return the model name for requests: `--model`, or else the first name that the server lists."""
        if not self._model:
            for method, path in (("GET", "/v1/models"), ("POST", "/v2/repository/index")):
                match (await self.ask(method, path, {} if method == "POST" else None)).value:
                    case {"data": [{"id": str(name)}, *_]} | [{"name": str(name)}, *_]:
                        self._model = name
                        break
            else:
                self._model = "model"
        return self._model

    async def body(
        self, prompt: str = PROMPT, tokens: int = 8, *, stream: bool = False, more: Mapping[str, Any] | None = None
    ) -> Body:
        dialect = await self.dialect()
        return await self.with_model(merge(dialect.body(prompt, tokens, stream), more or {}))

    async def with_model(self, body: Body) -> Body:
        """Return the body with the placeholder `{model}` replaced with the model name."""
        return {**body, "model": await self.model()} if body.get("model") == "{model}" else body

    async def path(self, *, stream: bool = False) -> str:
        dialect = await self.dialect()
        return await self.filled(dialect.stream_path if stream else dialect.path)

    async def filled(self, path: str) -> str:
        return path.replace("{model}", urllib.parse.quote(await self.model())) if "{model}" in path else path

    async def generate(
        self,
        prompt: str = PROMPT,
        tokens: int = 8,
        *,
        stream: bool = False,
        more: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Response:
        """Request generated text.

        Args:
            more: fields to merge into the body.
            timeout: the time limit in the contract, in seconds, or None for `--timeout`.
        """
        body = await self.body(prompt, tokens, stream=stream, more=more)
        return await self.post(await self.path(stream=stream), body, headers=headers, timeout=timeout)

    async def long_stream(self, seconds: float) -> tuple[Body, float]:
        """Return the body of a request whose stream takes about `seconds`, and the expected duration in seconds.

        The stream is shorter if the context of the model is too small.

        Raises:
            NotAsked: the longest possible stream is too short.
        """
        rate = await self._tokens_per_second()
        dialect = await self.dialect()
        tokens = max(16, min(_LONGEST, int(rate * seconds)))
        while tokens / rate >= _SHORTEST:
            for more in (dialect.endless, {}):
                body = await self.body(tokens=tokens, stream=True, more=more)
                if await self._accepts(body):
                    return body, tokens / rate
            tokens //= 2
        skip(f"at {rate:.0f} tokens/s, no response takes {_SHORTEST} s")

    async def _accepts(self, body: Body) -> bool:
        """Return whether the server accepts the request and starts a stream."""
        async with self.asking_for(await self.path(stream=True), body) as (connection, task):
            await connection.begun(2, self.limits.response)
            return not task.done() or (task.result().ok and "error" not in task.result().object)

    async def _tokens_per_second(self) -> float:
        if not self._rate:
            response = await self.generate(tokens=64, stream=True)
            if response.failure == "timeout":
                skip(
                    f"64 tokens, generated to measure the speed, took more than {self.limits.response:g} s (--timeout)"
                )
            if not response.ok or not (tokens := sum(map(bool, map(piece_of, response.events)))):
                raise Failed("a stream with text", response)
            self._rate = max(tokens / max(response.seconds, 1e-3), 0.1)
        return self._rate

    def of_profile(self, profile: str) -> Server:
        """Return this server with the dialect of another profile."""
        return Server(replace(self.asking, model=self._model), profile, self.lifetime)
