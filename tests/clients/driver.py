"""Drives a client library in its own interpreter: one script stays up, and makes a call for each line it is sent."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.clients import toolchains
from tests.djl.jars import QUICK
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


class Script:
    """One script of a client library, run by `command`. It starts at the first call.

    Args:
        environment: variables beside PATH; of ours and the user's there is none: no proxy to loopback, no token.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._command = [*command]
        self._environment = {"PATH": os.environ["PATH"], **(environment or {})}
        self._process: subprocess.Popen[str] | None = None

    def ask(self, job: Mapping[str, Any]) -> Outcome:
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
        if not line:
            self.close()
            raise AssertionError(f"the client script ended with status {process.returncode}")
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


class Driver:
    """One client of a library: `asynchronous` chooses between the two that a script may have."""

    def __init__(self, script: Script, *, asynchronous: bool = False) -> None:
        self._script = script
        self.asynchronous = asynchronous

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

    def run(self, code: str) -> str:
        """What code prints in the script's process, which has imported the library."""
        outcome = self.call("run", "", code)
        assert outcome.error is None, f"{outcome.error}: {outcome.message}"
        return str(outcome.answer)

    def call(self, how: str, url: str, prompt: str, **options: Any) -> Outcome:
        """`generate` or `stream`, whether it succeeds or fails."""
        job = {"how": how, "asynchronous": self.asynchronous, "url": url, "prompt": prompt, "options": options}
        return self._script.ask(job)


def python_client(environment: str, script: str, mode: str = "sync") -> Driver:
    """A Python client's script; `mode` is sync or async."""
    return Driver(_python_script(environment, script), asynchronous=mode == "async")


@functools.cache
def _python_script(environment: str, name: str) -> Script:
    """One for both modes, up until the run ends: importing a library takes seconds of computing."""
    python = toolchains.python(environment)
    variables = {"PYTHONUTF8": "1", "PYTHONPATH": str(_SCRIPTS), "HF_HOME": str(python.parents[1] / "hub")}
    variables["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else LiteLLM asks GitHub for prices first
    [path] = _SCRIPTS.rglob(f"{name}.py")
    return _until_the_end(Script([str(python), str(path)], variables))


@contextlib.contextmanager
def driving_node(script: str) -> Iterator[Driver]:
    """A script of npm/; what it imports is looked for beside it."""
    with skipped_without(), tempfile.TemporaryDirectory(prefix="npm-") as directory:
        packages = toolchains.node_modules()
        (Path(directory) / "node_modules").symlink_to(packages)
        for source in toolchains.NPM.glob("*.mjs"):
            shutil.copy(source, directory)
        with contextlib.closing(Script(["node", f"{directory}/{script}.mjs"])) as running:
            yield Driver(running)


def java_client(mode: str) -> Driver:
    """java/Drive.java."""
    with skipped_without():
        return Driver(_java_script(), asynchronous=mode == "async")


@functools.cache
def _java_script() -> Script:
    return _until_the_end(Script(["java", *QUICK, "-cp", toolchains.java_classpath(), "Drive"]))


def _until_the_end(script: Script) -> Script:
    atexit.register(script.close)
    return script


skipped_without = functools.partial(skipped_on, toolchains.Unavailable)
"""Skips a test where there is no Node, or no Java."""


def of_mode(value: Any, mode: str, id: str, *, newest: bool = True) -> Any:
    """A parameter of a client library's mode. The asynchronous half and older versions are left to the night."""
    return pytest.param(value, id=id, marks=[] if mode == "sync" and newest else [pytest.mark.nightly])


def drivers(environment: str, script: str) -> Callable[..., Any]:
    """A fixture: the script's driver, once synchronous and once not."""

    @pytest.fixture(scope="module", params=[of_mode(mode, mode, mode) for mode in ("sync", "async")])
    def driver(request: pytest.FixtureRequest) -> Driver:
        return python_client(environment, script, request.param)

    return driver
