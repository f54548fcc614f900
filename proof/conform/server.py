"""One profile's view of a server, which rules ask, and its process or container, which they start and stop."""

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
from proof.conform.dialects import AT_INVOCATIONS, OF_PROFILE, Body, Dialect, merge, piece_of
from proof.conform.exchange import Answer, Connection, connect, shown
from proof.conform.rule import Failed, skip

_ENGINES = ("docker", "podman")
_INSPECT = ("container", "inspect", "--format", "{{.State.Running}}")
_FAREWELL = 10.0
"""Seconds from SIGTERM to SIGKILL for a command that is still running after the rules."""


@dataclass
class Start:
    """Observations of a start.

    Attributes:
        first: the first request, sent after /ping answered 200.
        early: a request sent while /ping reported that it is not ready; None: the port was closed until it was.
    """

    first: Answer
    early: Answer | None = None


@dataclass
class Stop:
    """Observations after SIGTERM.

    Attributes:
        running: the stream that was running.
        later: answers to requests sent after the signal.
        seconds: until the process ended; None: it did not.
    """

    running: Answer
    later: list[Answer] = field(default_factory=list)
    seconds: float | None = None


class Lifetime(ABC):
    """A server that can be stopped as SageMaker does.

    Attributes:
        ours: whether `start` starts it.
        started, stopped: what was observed, once it was.
    """

    ours = False
    started: Start | None = None
    stopped: Stop | None = None

    @abstractmethod
    async def start(self) -> None:
        """Start it if it is ours to start; otherwise check that it runs."""

    @abstractmethod
    async def has_ended(self) -> bool:
        """Return whether it has ended."""

    @abstractmethod
    async def terminate(self) -> None:
        """Send SIGTERM."""

    @abstractmethod
    async def wait(self, seconds: float) -> bool:
        """Return whether it has ended in time."""

    @abstractmethod
    async def kill(self) -> None:
        """End what was started here."""


class Command(Lifetime):
    """A server that a command of ours starts, in a process group of its own."""

    ours = True

    def __init__(self, command: str) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"lmi conform: --command {command!r}: {error}") from None
        if not self._words:
            raise ConfigError("lmi conform: --command must not be empty")
        self._process: asyncio.subprocess.Process | None = None
        self._told = False

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
        self._told = True
        if not await self.has_ended():
            self._process.terminate()  # its first process alone, as Docker does

    async def wait(self, seconds: float) -> bool:
        assert self._process is not None
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._process.wait(), max(seconds, 0.01))
        return await self.has_ended()

    async def kill(self) -> None:
        """End it; `docker run` ends its container only at SIGTERM, so that comes first."""
        if self._process is None:
            return
        if not self._told:
            await self.terminate()
            await self.wait(_FAREWELL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its children too
        await self._process.wait()


class Container(Lifetime):
    """A running container, by name or id: docker's, otherwise podman's."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._engine = ""

    async def start(self) -> None:
        """Find out whether docker or podman has the container.

        Raises:
            ConfigError: neither has it, or it is not running.
        """
        told = []
        for engine in filter(shutil.which, _ENGINES):
            status, words = await _call(engine, *_INSPECT, self._name)
            if not status:
                self._engine = engine
                break
            told.append(f"{engine}: {words}")
        else:
            why = "; ".join(told) or f"it needs {' or '.join(_ENGINES)}"
            raise ConfigError(f"lmi conform: --container {self._name}: {why}")
        if words != "true":
            raise ConfigError(f"lmi conform: --container {self._name}: it is not running; start it first")

    async def has_ended(self) -> bool:
        """Return whether it has ended; a removed one has, too."""
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
        """Do nothing: it was not started here."""


async def _call(*words: str) -> tuple[int, str]:
    """Run a program; return its status, and what it wrote or else the last line of its errors."""
    process = await asyncio.create_subprocess_exec(
        *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, errors = await process.communicate()
    assert process.returncode is not None
    lines = (errors if process.returncode else out).decode(errors="replace").split("\n")
    return process.returncode, next((line.strip() for line in reversed(lines) if line.strip()), "")


PROMPT = "one two three four five six seven eight"
_LONGEST = 4096
"""Tokens of the longest stream that is asked for."""

_SHORTEST = 0.5
"""Minimum seconds of an answer that a rule observes while it runs."""


@dataclass(frozen=True)
class Limits:
    """Time limits of a server, in seconds.

    Attributes:
        answer: for an answer to a rule's request.
        whole: SageMaker's, for a whole answer.
        ping: SageMaker's, for /ping.
        connect: SageMaker's, until a connection is accepted.
        stop: SageMaker's, from SIGTERM to SIGKILL.
        abandoned: after a disconnect, until the engine has stopped.
        patience: until abandoned answers have ended, if the engine computes them to the end.
        long: length of a stream that must not end by itself.
        payload: SageMaker's largest body, in bytes.
    """

    answer: float = 60.0
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
    """The arguments of `lmi conform`.

    Attributes:
        key: the API key; empty: the server has none.
        model: the model's name in requests; empty: it is looked up.
        adapter: NAME=DIRECTORY of a LoRA adapter, as the server sees it; empty: none.
        metrics: the path of its metrics.
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
        last: the last answer to `ask`; None: there was none.
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
        self.last: Answer | None = None

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
    ) -> Answer:
        """Send one request on a connection of its own.

        Args:
            body: an object is sent as JSON, bytes as they are.
            headers: added to content-type, authorization and x-api-key, or replacing them.
            keyed: whether to send the key.
        """
        request, asked = self._request(method, path, body, headers or {}, keyed)
        timeout = timeout or self.limits.answer
        start = time.monotonic()
        try:
            connection = await connect(self.asking.url, timeout)
        except (OSError, ssl.SSLError, asyncio.TimeoutError) as error:
            reason = "no connection in time" if isinstance(error, asyncio.TimeoutError) else "refused"
            return Answer(asked, failure=reason, seconds=time.monotonic() - start)
        try:
            self.last = await connection.send(request, asked, timeout)
            return self.last
        finally:
            connection.close()

    async def get(self, path: str, **more: Any) -> Answer:
        return await self.ask("GET", path, **more)

    async def post(self, path: str, body: Body | bytes, **more: Any) -> Answer:
        return await self.ask("POST", path, body, **more)

    async def metrics(self) -> Answer:
        return await self.get(self.asking.metrics)

    @contextlib.asynccontextmanager
    async def asking_for(
        self, path: str, body: Body, timeout: float | None = None
    ) -> AsyncIterator[tuple[Connection, asyncio.Task[Answer]]]:
        """Send a request, and yield its connection and the task that waits for its answer; close it at the end.

        Args:
            timeout: seconds for the answer, by default those of a long one.
        """
        request, asked = self._request("POST", path, body, {}, True)
        connection = await connect(self.asking.url, self.limits.answer)
        task = asyncio.ensure_future(connection.send(request, asked, timeout or self.limits.answer + self.limits.long))
        try:
            yield connection, task
        finally:
            connection.close()
            await asyncio.wait([task])

    def _request(
        self, method: str, path: str, body: Body | bytes | None, headers: Mapping[str, str], keyed: bool
    ) -> tuple[bytes, str]:
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"host": self._where.netloc}
        if data or method == "POST":
            given["content-length"] = str(len(data))
        if body is not None:
            given["content-type"] = "application/json"
        if keyed and self.asking.key:
            given |= {"authorization": f"Bearer {self.asking.key}", "x-api-key": self.asking.key}
        given |= {name.lower(): value for name, value in headers.items()}
        path = self._where.path.rstrip("/") + path
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
        told = "".join(f" {name}: {value}" for name, value in headers.items() if "key" not in name.lower())
        asked = " ".join(part for part in (f"{method} {path}{told if keyed else ''}", shown(data)) if part)
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace") + data, asked

    # -- in the profile's dialect --------------------------------------------------------------------------------

    async def dialect(self) -> Dialect:
        """Return the server's dialect; at `/invocations` the first that it answers.

        Raises:
            NotAsked: there is none.
            Failed: the key is not accepted.
        """
        async with self._looking_up:  # requests at once need it too
            if self._dialect is None:
                self._dialect = await self._find_dialect()
        return self._dialect

    async def _find_dialect(self) -> Dialect:
        for dialect in AT_INVOCATIONS:
            body = await self.named(dialect.body(PROMPT, 2, False))
            answer = await self.post(await self.filled(dialect.path), body)
            if answer.ok:
                return dialect
        if answer.status in (401, 403) and self.asking.key:
            raise Failed("an answer with the key", answer)
        skip("/invocations answers neither inputs, nor messages, nor prompt")

    async def model(self) -> str:
        """Return the name that requests use: the given one, otherwise the first that the server lists."""
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
        return await self.named(merge(dialect.body(prompt, tokens, stream), more or {}))

    async def named(self, body: Body) -> Body:
        """Return the body with the model's name, if the dialect has one."""
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
    ) -> Answer:
        """Ask for text.

        Args:
            more: fields to merge into the body.
        """
        body = await self.body(prompt, tokens, stream=stream, more=more)
        return await self.post(await self.path(stream=stream), body, headers=headers)

    async def long_stream(self, seconds: float) -> tuple[Body, float]:
        """Return the request of a stream of about `seconds`, and its real length: the context may be small.

        Raises:
            NotAsked: the longest one is too short.
        """
        rate = await self._tokens_per_second()
        dialect = await self.dialect()
        tokens = max(16, min(_LONGEST, int(rate * seconds)))
        while tokens / rate >= _SHORTEST:
            for more in (dialect.endless, {}):
                body = await self.body(tokens=tokens, stream=True, more=more)
                if await self._takes(body):
                    return body, tokens / rate
            tokens //= 2
        skip(f"at {rate:.0f} tokens a second no answer lasts {_SHORTEST} s")

    async def _takes(self, body: Body) -> bool:
        """Return whether the server begins to answer."""
        async with self.asking_for(await self.path(stream=True), body) as (connection, task):
            await connection.begun(2, self.limits.answer)
            return not task.done() or (task.result().ok and "error" not in task.result().object)

    async def _tokens_per_second(self) -> float:
        if not self._rate:
            answer = await self.generate(tokens=64, stream=True)
            if answer.failure == "timeout":
                skip(f"64 tokens, which would show the speed, took over {self.limits.answer:g} s (--timeout)")
            if not answer.ok or not (tokens := sum(map(bool, map(piece_of, answer.events)))):
                raise Failed("a stream with text", answer)
            self._rate = max(tokens / max(answer.seconds, 1e-3), 0.1)
        return self._rate

    def of_profile(self, profile: str) -> Server:
        """Return the same server in another profile's dialect."""
        return Server(replace(self.asking, model=self._model), profile, self.lifetime)
