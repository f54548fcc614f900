"""Starts DJL for tests and for `make djl`: a user's DJL Serving, else DJL's Python engine behind our front end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.djl import home, jars
from tests.djl.processes import group_members, only

MODEL = "model"  # the name it is served under: /predictions/model
WORKER = "djl_python_engine.py"
ENGINE = "handler.engines.process"


class StartFailed(AssertionError):
    """The message holds the reason and everything that Java and the worker wrote."""


class DjlServer:
    """One running DJL: Java, its Python worker, the worker's engine process. `log` is what all of them have written."""

    def __init__(
        self, process: subprocess.Popen[str], url: str = "", show: Callable[[str], None] | None = None
    ) -> None:
        self.process = process
        self.url = url  # empty where the log will say it
        self.lines: list[str] = []
        self._show = show
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def post(self, body: Any, path: str = "/invocations", **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, **{"timeout": 60, **more})

    def worker_pid(self) -> int:
        """DJL's Python worker: the process that our handler lives in."""
        return only(WORKER, group=self.process.pid)

    def engine_pid(self) -> int:
        """The engine process, the worker's child."""
        return only(ENGINE, parent=self.worker_pid())

    def wait_ready(self, seconds: float, tick: Callable[[float], None] = lambda elapsed: None) -> None:
        """
        Raises:
            StartFailed: it ended, or it was not ready in time.
        """
        began = time.monotonic()
        while not self._ready():
            elapsed = time.monotonic() - began
            if self.process.poll() is not None:
                self._reader.join(5)
                raise StartFailed(f"DJL ended with status {self.process.returncode}: {self.reason()}\n{self.log}")
            if elapsed > seconds:
                raise StartFailed(f"DJL is not ready after {seconds} s:\n{self.log}")
            tick(elapsed)
            time.sleep(0.05)

    def reason(self) -> str:
        """Why a start failed, in one line: what Python raised says more than what Java makes of it."""
        raised = re.findall(r"-std(?:out|err): ((?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)\b.*)", self.log)
        return raised[-1] if raised else (self.lines or ["no word of it"])[-1].strip()

    def stop(self) -> None:
        """Ends it as a container is ended, and sees to it that no process of its own is left.

        Raises:
            AssertionError: a process outlived Java; it is killed.
        """
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        deadline = time.monotonic() + 5
        while (left := group_members(self.process.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()
        assert not left, f"still there 5 s after the end of DJL: {left}\n{self.log}"

    def _ready(self) -> bool:
        if self.url:  # DJL Serving opens its port when the model has loaded
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(self.url + "/ping", timeout=5).status_code == 200
        elif found := re.search(r"^front: ready on (\S+)$", self.log, re.MULTILINE):
            self.url = found[1]
            return True
        return False

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if self._show:
                self._show(line)


def versions(since: str = "0") -> list[str]:
    """What the tests run on, of those not older than `since`."""
    named = os.environ.get("DJL_SERVING_HOME")
    return [version for version in ([home.version(Path(named))] if named else jars.VERSIONS) if newer(version, since)]


def newer(version: str, since: str) -> bool:
    """Whether a version is `since` or later."""
    return [int(part) for part in version.split(".")] >= [int(part) for part in since.split(".")]


@contextlib.contextmanager
def djl(
    version: str,
    properties: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    seconds: float = 100,
) -> Iterator[DjlServer]:
    """DJL with one model directory, ready: `properties` are its serving.properties, `files` what lies beside them.

    Where there is no Java, the test is skipped; in CI that is a failure.
    """
    with tempfile.TemporaryDirectory(prefix="djl-") as directory:
        scratch = Path(directory)
        model = write_model(scratch / "model", serving_properties(properties or {}), files or {})
        named = os.environ.get("DJL_SERVING_HOME")
        try:
            server = start(Path(named) if named else None, version, scratch, model, env=env)
        except jars.Unavailable as error:
            if os.environ.get("CI") == "true":
                raise
            pytest.skip(str(error))
        try:
            server.wait_ready(seconds)
            yield server
        finally:
            server.stop()


def serving_properties(properties: Mapping[str, str]) -> str:
    """One worker: DJL Serving would start one for each core."""
    everything = {"engine": "Python", "minWorkers": "1", "maxWorkers": "1", **properties}
    return "".join(f"{key}={value}\n" for key, value in everything.items())


def write_model(directory: Path, properties: str, files: Mapping[str, str]) -> Path:
    directory.mkdir()
    for name, text in {"serving.properties": properties, **files}.items():
        (directory / name).write_text(text)
    return directory


def start(
    serving: Path | None,
    version: str,
    scratch: Path,
    model: Path,
    port: int = 0,
    env: Mapping[str, str] | None = None,
    show: Callable[[str], None] | None = None,
) -> DjlServer:
    """DJL Serving if its home is given, else the engine of that version behind our front end. `scratch` must be its
    own: DJL's sockets are named alike in every start and lie in java.io.tmpdir.

    Raises:
        jars.Unavailable: what it needs is not there and cannot be had.
    """
    if serving:
        port = port or free_port()
        config = scratch / "config.properties"
        config.write_text(home.config(port, free_port()))
        command = home.command(serving, config, MODEL, model)
        more, url = home.environment(serving, scratch), f"http://127.0.0.1:{port}"
    else:
        command, url = front_command(version, scratch, model, port), ""
        more = {"DJL_CACHE_DIR": str(jars.engine(version))}
    process = subprocess.Popen(
        command,
        cwd=scratch,
        env={**clean_environment(), "PYTHON_EXECUTABLE": sys.executable, **more, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    return DjlServer(process, url, show)


def front_command(version: str, scratch: Path, model: Path, port: int) -> list[str]:
    log = {"showThreadName": "false", "showLogName": "false", "levelInBrackets": "true", "log.server_metric": "warn"}
    defined = {f"org.slf4j.simpleLogger.{key}": value for key, value in log.items()}
    # One line for each request in async mode, for nothing that a test could ask.
    defined["org.slf4j.simpleLogger.log.ai.djl.python.engine.AsyncRequestManager"] = "warn"
    defined |= {"ai.djl.offline": "true", "java.io.tmpdir": str(scratch)}
    flags = [
        "-Xmx512m",
        "-XX:+UseSerialGC",
        "-XX:-UsePerfData",
        *(f"-D{key}={value}" for key, value in defined.items()),
    ]
    classes = f"{jars.front(version)}:{jars.engine(version)}/lib/*"
    return ["java", *flags, "-cp", classes, "Front", str(port), str(model)]


def clean_environment() -> dict[str, str]:
    """Ours, without what DJL or the handler would take for settings."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("OPTION_", "SERVING_", "HF_"))}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
