"""An engine's process ends with those that it has started; vLLM's and TensorRT-LLM's are tried in their own tests."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import multiprocessing, os, subprocess, sys, time
from handler.engines.process.supervisor import end_with_children, end_with_descendants

if sys.argv[1] == "children":
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), name="core")
    child.start()
    leave = end_with_children()
else:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "the core"])
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    leave = end_with_descendants("the core")
    other.kill()  # it is not watched
    other.wait()
    time.sleep(0.3)
if sys.argv[2] == "closing":
    leave()
child.kill()
child.wait() if isinstance(child, subprocess.Popen) else child.join()
time.sleep(1 if sys.argv[2] == "closing" else 20)
print("it went on")
"""


@pytest.mark.parametrize(("kind", "name"), [("children", "core"), ("descendants", "the core (pid ")])
def test_a_death_ends_this_process_unless_it_was_called_off(kind: str, name: str) -> None:
    for when, status, said in (("running", 1, ""), ("closing", 0, "it went on\n")):
        command = [sys.executable, "-c", _PROGRAM, kind, when]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (status, said), done.stderr
        assert (f"the engine's own process {name}" in done.stderr) == (when == "running"), done.stderr
