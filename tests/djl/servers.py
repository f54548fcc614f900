"""DJL for tests: `with djl(version, properties, files) as server`, on each of `versions()`."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.djl import home, jars
from tests.djl.launch import Djl, write_model
from tests.djl.processes import only
from tests.environment import clean_environment, skipped_on
from tests.servers import http, one_core


class DjlServer(Djl):
    def post(self, body: Any, path: str = "/invocations", **more: Any) -> httpx.Response:
        return http.post(self.url + path, json=body, **{"timeout": 60, **more})

    def status(self, body: Any, seconds: float = 5) -> int | None:
        """That of the answer; None where none comes in time, as none does to what Java hands to a dying worker."""
        try:
            return self.post(body, timeout=seconds).status_code
        except httpx.TimeoutException:
            return None

    def worker_pid(self) -> int:
        """DJL's Python worker: the process that our handler lives in."""
        return only("djl_python_engine.py", group=self.process.pid)

    def engine_pid(self) -> int:
        """The engine process, the worker's child."""
        return only("handler.engines.process.engine_process", parent=self.worker_pid())


def versions(since: str = "0") -> list[str]:
    """What the tests run on, of those not older than `since`."""
    named = os.environ.get("DJL_SERVING_HOME")
    return [version for version in ([home.version(Path(named))] if named else jars.VERSIONS) if newer(version, since)]


def newer(version: str, since: str) -> bool:
    """Whether a version is `since` or later."""
    return [int(part) for part in version.split(".")] >= [int(part) for part in since.split(".")]


skipped_without_java = functools.partial(skipped_on, jars.Unavailable)
"""Skips a test where there is no Java."""


@contextlib.contextmanager
def djl(
    version: str,
    properties: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    seconds: float = 100,
    *,
    own_release: bool = False,
) -> Iterator[DjlServer]:
    """DJL with one model directory, ready: `properties` are its serving.properties, `files` what lies beside them.

    `own_release` has the handler answer as LMI of that version does; by default it does as the embedded server.
    """
    # One worker: DJL Serving would start one for each core.
    everything = {"engine": "Python", "minWorkers": "1", "maxWorkers": "1"}
    everything |= {**({} if own_release else {"option.lmi_version": "0.28"}), **(properties or {})}
    text = "".join(f"{key}={value}\n" for key, value in everything.items())
    named = os.environ.get("DJL_SERVING_HOME")
    with tempfile.TemporaryDirectory(prefix="djl-") as directory:
        scratch = Path(directory)
        model = write_model(scratch / "model", text, files)
        cores = one_core() if "option.model_id" in everything else contextlib.nullcontext()
        with skipped_without_java(), cores:
            server = DjlServer.start(
                Path(named) if named else None, version, scratch, model, env={**clean_environment(), **(env or {})}
            )
        try:
            server.wait_ready(seconds)
            yield server
        finally:
            server.stop()
            print(server.log)  # pytest shows it where a test fails
