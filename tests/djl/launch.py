"""Starts DJL and ends it: a user's DJL Serving, else DJL's Python engine behind our front end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from typing_extensions import Self

from tests.djl import home, jars
from tests.djl.processes import group_members
from tests.ports import free_port

MODEL = "model"  # the name it is served under: /predictions/model
_VAGUE = ("prediction failure", "invoke handler failure", "service.invoke_handler_async() failure")


def _unseen(line: str) -> None:
    pass


class StartFailed(Exception):
    """The message is the reason, and after its first line everything that Java and the worker wrote."""


class Djl:
    """One running DJL: Java, its Python worker, the worker's engine process. `log` is what all of them have written."""

    def __init__(self, process: subprocess.Popen[str], url: str, show: Callable[[str], None]) -> None:
        self.process = process
        self.url = url  # empty where the log will say it
        self.lines: list[str] = []
        self._show = show
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @classmethod
    def start(
        cls,
        serving: Path | None,
        version: str,
        scratch: Path,
        model: Path,
        port: int = 0,
        env: Mapping[str, str] = os.environ,
        show: Callable[[str], None] = _unseen,
    ) -> Self:
        """DJL Serving if its home is given, else the engine of that version behind our front end. `scratch` must be
        its own: DJL's sockets are named alike in every start and lie in java.io.tmpdir.

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
            command, url = [*java(version, scratch), "Front", str(port), str(model)], ""
            more = _front_environment(version)
        return cls(_popen(command, scratch, {**more, **env}), url, show)

    @property
    def log(self) -> str:
        return "".join(self.lines)

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
                raise StartFailed(f"DJL is not ready after {seconds} s\n{self.log}")
            tick(elapsed)
            time.sleep(0.05)

    def reason(self) -> str:
        """Why it ended, in one line: the handler's own words, else what Python raised, else the last line."""
        said = re.findall(r"Failed to initialize model: (.*)", self.log)
        if said and said[-1] not in _VAGUE:
            return str(said[-1])
        raised = re.findall(r"-std(?:out|err): ((?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)\b.*)", self.log)
        return str(raised[-1]) if raised else (self.lines or ["no word of it"])[-1].strip()

    def stop(self) -> None:
        """Ends it as a container is ended, and sees to it that no process of its own is left.

        Raises:
            AssertionError: a process outlived Java; it is killed.
        """
        known = group_members(self.process.pid)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        deadline = time.monotonic() + 5
        while (left := group_members(self.process.pid)) and time.monotonic() < deadline:
            # In async mode DJL closes its worker's connection, takes that for the worker's death and starts another.
            _kill(left.keys() - known.keys())
            time.sleep(0.05)
        _kill(left)
        self.process.wait()
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()
        assert not left, f"still there 5 s after the end of DJL: {left}\n{self.log}"

    def _ready(self) -> bool:
        if self.url:  # DJL Serving opens its port when the model has loaded
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url + "/ping", timeout=5) as reply:
                return bool(reply.status == 200)
        elif found := re.search(r"^front: ready on (\S+)$", self.log, re.MULTILINE):
            self.url = found[1]
            return True
        return False

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            self._show(line)


def write_model(directory: Path, properties: str, files: Mapping[str, str] | None = None) -> Path:
    directory.mkdir()
    for name, text in {"serving.properties": properties, **(files or {})}.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def java(version: str, scratch: Path) -> list[str]:
    """The command that runs a class of the front end. Its classes come from an archive: half of a start's CPU time."""
    return _java(version, scratch, f"-XX:SharedArchiveFile={_archive(version)}")


def run(version: str, program: str, text: str) -> str:
    """Give `text` to a class of the front end that has a main; return what it writes.

    Raises:
        subprocess.CalledProcessError: it failed; stderr has Java's reason.
    """
    command = [*java(version, Path(tempfile.gettempdir())), program]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def _java(version: str, scratch: Path, *more: str) -> list[str]:
    log = {"showThreadName": "false", "showLogName": "false", "levelInBrackets": "true", "log.server_metric": "warn"}
    defined = {f"org.slf4j.simpleLogger.{key}": value for key, value in log.items()}
    # One line for each request in async mode, for nothing that a test could ask.
    defined["org.slf4j.simpleLogger.log.ai.djl.python.engine.AsyncRequestManager"] = "warn"
    defined |= {"ai.djl.offline": "true", "java.io.tmpdir": str(scratch)}
    flags = [
        "-Xmx512m",
        *jars.QUICK,
        "-XX:-UsePerfData",
        "-Xlog:cds=off",  # an archive of another Java is not used, and no matter
        *more,
        *(f"-D{key}={value}" for key, value in defined.items()),
    ]
    return ["java", *flags, "-cp", jars.classpath(version)]


def _archive(version: str) -> Path:
    """The classes of a start and of a request, as Java maps them into its memory."""

    def make(scratch: Path) -> None:
        model = write_model(scratch / "model", "engine=Python\nminWorkers=1\nmaxWorkers=1\n", {"model.py": _NOTHING})
        command = _java(version, scratch, f"-XX:ArchiveClassesAtExit={scratch / 'classes.jsa'}")
        env = {**_front_environment(version), **os.environ}
        djl = Djl(_popen([*command, "Front", "0", str(model)], scratch, env), "", _unseen)
        try:
            djl.wait_ready(100)
            urllib.request.urlopen(f"{djl.url}/invocations", b"{}", timeout=60).close()
        finally:
            djl.stop()

    front = jars.front(version)
    return jars.once(front.with_name(f"{front.name}-classes"), make) / "classes.jsa"


_NOTHING = """
from djl_python import Output


def handle(inputs):
    return None if inputs.is_empty() else Output().add_as_json({})
"""


def _front_environment(version: str) -> dict[str, str]:
    return {"DJL_CACHE_DIR": str(jars.engine(version))}


def _popen(command: list[str], scratch: Path, env: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=scratch,
        env={"PYTHON_EXECUTABLE": sys.executable, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a process group of its own: all that is left of it can be found
    )


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
