"""The bar of a measurement: on a terminal it counts its steps and disappears; a pipe gets nothing of it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
_CODE = """
from handler.bench.report.progress import progress_bar
with progress_bar(2) as advance:
    advance("1 client")
    advance("8 clients")
"""


def test_a_terminal_gets_a_bar() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        done = subprocess.run(
            [sys.executable, "-c", _CODE], stderr=theirs, cwd=ROOT, env={**os.environ, "TERM": "xterm"}
        )
        os.close(theirs)
        shown = terminal.read(65536).decode()
    assert done.returncode == 0
    assert "8 clients" in shown
    assert "1/2" in shown
    assert shown.rstrip("\r\n").endswith("\x1b[2K"), "the line is cleared at the end"


def test_a_pipe_gets_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, cwd=ROOT, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")
