"""The bar of a measurement: on a terminal it counts its steps and disappears; a pipe gets nothing of it."""

from __future__ import annotations

from tests.doubles import terminal

_CODE = """
from proof.bench.report import progress_bar
with progress_bar(2) as advance:
    advance("1 client")
    advance("8 clients")
"""


def test_a_terminal_gets_a_bar() -> None:
    shown = terminal.shown(_CODE)
    assert "8 clients" in shown
    assert "1/2" in shown
    assert shown.rstrip("\r\n").endswith("\x1b[2K"), "the line is cleared at the end"


def test_a_pipe_gets_nothing() -> None:
    assert terminal.piped(_CODE) == ""
