"""The entry point as process 1 of a PID namespace, as in a container: it waits for orphans and passes signals on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.environment import clean_environment
from tests.ports import free_port
from tests.servers import http, wait_for

# Its own /proc, so that it finds itself there; the mount goes with the namespace.
UNSHARE = ["unshare", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
ORPHAN = "import os, time\nif os.fork() == 0:\n    time.sleep(0.2)\n    os._exit(0)"


class ProcessOne:
    """`pid` is its number outside."""

    def __init__(self, port: int, environment: Mapping[str, str]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.unshare = subprocess.Popen(
            [*UNSHARE, sys.executable, "-m", "handler.container", "serve", "--engine", "echo"],
            env={**clean_environment(), "SAGEMAKER_BIND_TO_PORT": str(port), "LMI_HOST": "127.0.0.1", **environment},
            stderr=subprocess.DEVNULL,
        )
        wait_for(lambda: children(self.unshare.pid), 20, "there is no process 1")
        [self.pid] = children(self.unshare.pid)

    def ready(self) -> bool:
        assert self.unshare.poll() is None
        try:
            return http.get(self.url + "/ping", timeout=2).status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def process_one(scratch: Path, **environment: str) -> Iterator[ProcessOne]:
    places = {"SAGEMAKER_MODEL_PATH": str(scratch / "ml" / "model"), "LMI_SCRATCH": str(scratch / "scratch")}
    found = ProcessOne(free_port(), {**places, **environment})
    try:
        yield found
    finally:
        found.unshare.kill()
        found.unshare.wait()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def test_orphans_are_waited_for(tmp_path: Path) -> None:
    with process_one(tmp_path) as one:
        wait_for(one.ready, 30, "it is not ready")
        before = set(children(one.pid))
        enter = ["nsenter", "--target", str(one.pid), "--user", "--pid", "--preserve-credentials"]
        subprocess.run([*enter, sys.executable, "-c", ORPHAN], check=True)
        wait_for(lambda: set(children(one.pid)) == before, 10, "an orphan that has died is still there")
        assert all(state(pid) != "Z" for pid in before)


def test_sigterm_lets_an_answer_finish(tmp_path: Path) -> None:
    body = {"inputs": "a b c", "parameters": {"max_new_tokens": 30, "details": True}, "stream": True}
    with process_one(tmp_path, OPTION_ECHO_TOKENS_PER_SECOND="20") as one:
        wait_for(one.ready, 30, "it is not ready")
        with http.stream("POST", one.url + "/invocations", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            os.kill(one.pid, signal.SIGTERM)
            assert len([first, *lines]) == 30
        assert one.unshare.wait(30) == 0


@pytest.mark.parametrize("later", [0, 0.2, 0.6])
def test_a_sigterm_that_comes_early_is_not_lost(tmp_path: Path, later: float) -> None:
    """From when process 1 has a handler: before, the kernel drops it."""
    with process_one(tmp_path) as one:
        wait_for(lambda: catches(one.pid, signal.SIGTERM), 20, "process 1 has no handler")
        time.sleep(later)
        os.kill(one.pid, signal.SIGTERM)
        assert one.unshare.wait(20) == 0


def catches(pid: int, number: signal.Signals) -> bool:
    found = re.search(r"SigCgt:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return bool(int(found[1], 16) >> number - 1 & 1)
