"""When DJL Serving's worker counts as lost."""

from __future__ import annotations

import subprocess
import sys

from handler.container.monitor import WorkerWatch
from tests.servers import wait_for


def test_a_worker_is_lost_when_there_was_one_and_is_none_for_a_while() -> None:
    sleeps = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    worker = subprocess.Popen([*sleeps, "djl_python_engine.py"], start_new_session=True, stdout=subprocess.PIPE)
    assert worker.stdout is not None
    watch = WorkerWatch(worker.pid, patience=0.3)
    try:
        with worker.stdout:
            worker.stdout.readline()  # it runs: its command line is there
        assert not watch.is_lost()
    finally:
        worker.kill()
        worker.wait()
    assert not watch.is_lost()
    wait_for(watch.is_lost, 10, "it is not missed")


def test_a_server_that_has_not_started_one_has_lost_none() -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        watch = WorkerWatch(other.pid, patience=-1)
        assert not any(watch.is_lost() for _ in range(3))
    finally:
        other.kill()
        other.wait()
