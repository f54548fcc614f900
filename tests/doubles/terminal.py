"""Runs Python code with a terminal as its standard error."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def shown(code: str) -> str:
    """Run `code` to its end, and return what the terminal got."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        environment = {**os.environ, "TERM": "xterm"}
        done = subprocess.run([sys.executable, "-c", code], stderr=theirs, cwd=ROOT, env=environment, timeout=100)
        text = terminal.read(65536).decode()
        os.close(theirs)
    assert done.returncode == 0, text
    return text


def piped(code: str) -> str:
    """Run `code` to its end, and return what a pipe got."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
