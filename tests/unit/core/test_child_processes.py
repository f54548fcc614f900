"""What is shown while a helper program runs."""

from __future__ import annotations

from tests.doubles import terminal

_CODE = """
import sys
from handler.core import child_processes
assert child_processes.run([sys.executable, "-c", ""], doing="converting [a] model").returncode == 0
"""


def test_a_terminal_shows_what_is_done_and_clears_it() -> None:
    shown = terminal.shown(_CODE)
    assert "converting [a] model" in shown
    assert "0:00:00" in shown
    assert shown.rstrip("\r\n").endswith("\x1b[2K")


def test_a_pipe_gets_nothing() -> None:
    assert terminal.piped(_CODE) == ""
