"""When DJL Serving's worker counts as lost."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from handler.container import supervisor
from handler.container.supervisor import WorkerWatch


def test_a_worker_is_lost_when_there_was_one_and_is_none_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now))
    sleeps = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    worker = subprocess.Popen([*sleeps, "djl_python_engine.py"], start_new_session=True, stdout=subprocess.PIPE)
    assert worker.stdout is not None
    watch = WorkerWatch(worker.pid, patience=6.0)
    try:
        with worker.stdout:
            worker.stdout.readline()  # it runs: its command line is there
        assert not watch.is_lost()
    finally:
        worker.kill()
        worker.wait()
    now = 6.0
    assert not watch.is_lost()
    now = 6.1
    assert watch.is_lost()


def test_a_server_that_has_not_started_one_has_lost_none() -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        watch = WorkerWatch(other.pid, patience=-1)
        assert not any(watch.is_lost() for _ in range(3))
    finally:
        other.kill()
        other.wait()
