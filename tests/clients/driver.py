"""Drives a client library in its own interpreter: one script stays up, and makes a call for each line it is sent."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from tests.clients import toolchains, venvs
from tests.environment import skipped_on

_SCRIPTS = Path(__file__).parent / "scripts"

HUBS = {"0.36": "text-generation", "1.33": "langchain", "2.4": "huggingface-hub"}
"""Major versions of huggingface_hub differ in their HTTP library; each comes with one of the environments."""


class Outcome(NamedTuple):
    """What one call brought. `error` is the exception's class, with its module, or None; `events` are a stream's."""

    answer: Any
    events: list[Any]
    error: str | None
    message: str


class Driver:
    """One client library, driven by `command`. `asynchronous` chooses between its two clients.

    Args:
        environment: variables beside PATH; of ours and the user's there is none: no proxy to loopback, no token.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, *, asynchronous: bool = False
    ) -> None:
        self._command = [*command]
        self._environment = {"PATH": os.environ["PATH"], **(environment or {})}
        self.asynchronous = asynchronous
        self._process: subprocess.Popen[str] | None = None

    def generate(self, url: str, prompt: str, **options: Any) -> Any:
        """A whole answer as the client parsed it, turned into plain values."""
        outcome = self.call("generate", url, prompt, **options)
        assert outcome.error is None, f"{outcome.error}: {outcome.message}"
        return outcome.answer

    def stream(self, url: str, prompt: str, **options: Any) -> list[Any]:
        """A stream's events, likewise."""
        outcome = self.call("stream", url, prompt, **options)
        assert outcome.error is None, f"{outcome.error}: {outcome.message}, after {outcome.events}"
        return outcome.events

    def call(self, how: str, url: str, prompt: str, **options: Any) -> Outcome:
        """`generate` or `stream`, whether it succeeds or fails."""
        job = {"how": how, "asynchronous": self.asynchronous, "url": url, "prompt": prompt, "options": options}
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BaseException:  # also pytest's timeout: the next call must not get this one's answer
            self.close()
            raise
        assert line, f"the client script ended with status {process.wait()}"
        return Outcome(**json.loads(line))

    def close(self) -> None:
        """End the script, which a call that hangs keeps from ending on its own."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                encoding="utf-8",
                env=self._environment,
            )
        return self._process


@contextlib.contextmanager
def driving(environment: str, script: str, mode: str) -> Iterator[Driver]:
    """A Python client's script; `mode` is sync or async."""
    python = venvs.python(environment)
    variables = {"PYTHONUTF8": "1", "PYTHONPATH": str(_SCRIPTS), "HF_HOME": str(python.parents[1] / "hub")}
    variables["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else LiteLLM asks GitHub for prices first
    [path] = _SCRIPTS.rglob(f"{script}.py")
    with _closing(Driver([str(python), str(path)], variables, asynchronous=mode == "async")) as one:
        yield one


@contextlib.contextmanager
def driving_node(script: str) -> Iterator[Driver]:
    """A script of npm/; what it imports is looked for beside it."""
    with skipped_without(), tempfile.TemporaryDirectory(prefix="npm-") as directory:
        packages = toolchains.node_modules()
        (Path(directory) / "node_modules").symlink_to(packages)
        for source in toolchains.NPM.glob("*.mjs"):
            shutil.copy(source, directory)
        with _closing(Driver(["node", f"{directory}/{script}.mjs"])) as driver:
            yield driver


@contextlib.contextmanager
def driving_java(mode: str) -> Iterator[Driver]:
    """java/Drive.java."""
    with skipped_without():
        classpath = toolchains.java_classpath()
        with _closing(Driver(["java", "-cp", classpath, "Drive"], asynchronous=mode == "async")) as driver:
            yield driver


@contextlib.contextmanager
def _closing(driver: Driver) -> Iterator[Driver]:
    try:
        yield driver
    finally:
        driver.close()


skipped_without = functools.partial(skipped_on, toolchains.Unavailable)
"""Skips a test where there is no Node, or no Java."""


def drivers(environment: str, script: str, *, scope: Literal["session", "module"]) -> Callable[..., Any]:
    """A fixture: the script's driver, once synchronous and once not."""

    @pytest.fixture(scope=scope, params=["sync", "async"])
    def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
        with driving(environment, script, request.param) as found:
            yield found

    return driver
