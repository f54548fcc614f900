"""The server's process or container, for the rules about its beginning and end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from handler.conform.exchange import Answer
from handler.core.errors import ConfigError


@dataclass
class Start:
    """What a start showed.

    Attributes:
        first: the first request, sent when /ping had said 200.
        early: a request while /ping said that it is not ready; None: the port was closed until it was.
    """

    first: Answer
    early: Answer | None = None


@dataclass
class Stop:
    """What SIGTERM showed.

    Attributes:
        running: the stream that ran.
        later: answers to requests that came after the signal.
        seconds: until the process had ended; None: it had not.
    """

    running: Answer
    later: list[Answer] = field(default_factory=list)
    seconds: float | None = None


class Lifetime(ABC):
    """Something that can be stopped as SageMaker stops it.

    Attributes:
        ours: whether `start` starts it.
        started, stopped: what was seen, once it was.
    """

    ours = False
    started: Start | None = None
    stopped: Stop | None = None

    @abstractmethod
    async def start(self) -> None:
        """Start it, where that is ours to do; else see that it runs."""

    @property
    def ended(self) -> bool:
        """Whether it is known to have ended."""
        return False

    @abstractmethod
    async def terminate(self) -> None:
        """Send SIGTERM."""

    @abstractmethod
    async def wait(self, seconds: float) -> int | None:
        """Return its exit status; None where it has not ended in time."""

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
            raise ConfigError("lmi conform: --command is empty")
        self._process: asyncio.subprocess.Process | None = None

    @property
    def ended(self) -> bool:
        return self._process is not None and self._process.returncode is not None

    async def start(self) -> None:
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._words, stdin=asyncio.subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True
            )
        except OSError as error:
            raise ConfigError(f"lmi conform: {self._words[0]} cannot be run: {error.strerror}") from None

    async def terminate(self) -> None:
        assert self._process is not None
        if not self.ended:
            self._process.terminate()  # its first process alone, as Docker does

    async def wait(self, seconds: float) -> int | None:
        assert self._process is not None
        try:
            return await asyncio.wait_for(self._process.wait(), max(seconds, 0.01))
        except asyncio.TimeoutError:
            return None

    async def kill(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its children too
        await self._process.wait()


class Container(Lifetime):
    """A container that runs already, by its name, through the command `docker`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        if await self._docker("inspect", "--format", "{{.State.Running}}", self._name) != "true":
            raise ConfigError(f"lmi conform: --container {self._name}: it does not run")

    async def terminate(self) -> None:
        self._waiting = await asyncio.create_subprocess_exec(
            "docker", "wait", self._name, stdout=asyncio.subprocess.PIPE
        )
        await self._docker("kill", "--signal", "TERM", self._name)

    async def wait(self, seconds: float) -> int | None:
        assert self._waiting is not None
        try:
            out, _ = await asyncio.wait_for(self._waiting.communicate(), max(seconds, 0.01))
        except asyncio.TimeoutError:
            return None
        return int(out) if out.strip().isdigit() else None

    async def kill(self) -> None:
        if self._waiting is not None and self._waiting.returncode is None:
            self._waiting.kill()
            await self._waiting.wait()

    async def _docker(self, *arguments: str) -> str:
        try:
            process = await asyncio.create_subprocess_exec(
                "docker", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
        except OSError as error:
            raise ConfigError(f"lmi conform: --container needs docker: {error.strerror}") from None
        out, failed = await process.communicate()
        if process.returncode:
            raise ConfigError(f"lmi conform: docker {arguments[0]} failed: {failed.decode(errors='replace').strip()}")
        return out.decode().strip()
