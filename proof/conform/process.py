"""The server's process or container, for the rules about its beginning and end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from handler.core.errors import ConfigError
from proof.conform.exchange import Answer
from proof.conform.rule import skip

_ENGINES = ("docker", "podman")
_INSPECT = ("container", "inspect", "--format", "{{.State.Running}}")
_FAREWELL = 10.0
"""Seconds from SIGTERM to SIGKILL for a command that no rule has ended."""


@dataclass
class Start:
    """Observations of a start.

    Attributes:
        first: the first request, sent when /ping had said 200.
        early: a request while /ping said that it is not ready; None: the port was closed until it was.
    """

    first: Answer
    early: Answer | None = None


@dataclass
class Stop:
    """Observations after SIGTERM.

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

    @abstractmethod
    async def has_ended(self) -> bool:
        """Return whether it runs no more."""

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
            raise ConfigError("lmi conform: --command is empty")
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
    """A container that runs already, by its name or id: docker's, or else podman's."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._engine = ""

    async def start(self) -> None:
        """Find the engine that has the container.

        Raises:
            ConfigError: none has it, or it does not run.
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
        """One that its engine has removed has, too."""
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
        """It was not started here."""


async def _call(*words: str) -> tuple[int, str]:
    """Run a program; return its status, and what it wrote or else the last line of its errors."""
    process = await asyncio.create_subprocess_exec(
        *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, errors = await process.communicate()
    assert process.returncode is not None
    lines = (errors if process.returncode else out).decode(errors="replace").split("\n")
    return process.returncode, next((line.strip() for line in reversed(lines) if line.strip()), "")
