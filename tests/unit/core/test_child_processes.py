"""A child process and its end: early, late, twice, and without its help."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from handler.core.child_processes import Child
from tests.one_test import in_one_test
from tests.process_tree import alive

SLEEP = "import time; print(flush=True); time.sleep(600)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"


@pytest.fixture
def made() -> Iterator[list[Child]]:
    children: list[Child] = []
    yield children
    for child in children:
        child.end()
        with child:
            pass


def started(made: list[Child], boot: str) -> Child:
    """A child that has executed its first statements."""
    made.append(Child([sys.executable, "-S", "-c", boot], stdout=-1))
    assert made[-1].stdout is not None
    made[-1].stdout.readline()
    return made[-1]


@in_one_test(
    ("boot", "number", "status"),
    [
        (SLEEP, None, -signal.SIGKILL),
        (SLEEP, signal.SIGTERM, -signal.SIGTERM),
        (DEAF, signal.SIGTERM, -signal.SIGKILL),
        ("raise SystemExit(3)", signal.SIGTERM, 3),
    ],
)
def test_a_child_ends_as_asked_or_is_killed(
    made: list[Child], boot: str, number: signal.Signals | None, status: int
) -> None:
    child = started(made, boot)
    if boot in (SLEEP, DEAF):
        assert child.status() is None
    else:
        assert child.status(60) == status
    child.end(0.05 if boot == DEAF else 60 if number else 0, number)
    assert (child.status(), alive(child.pid)) == (status, False)
    child.end(60, number)
    assert child.status() == status, "it has ended already"


def test_a_child_that_is_stopped_ends(made: list[Child]) -> None:
    child = started(made, SLEEP)
    os.kill(child.pid, signal.SIGSTOP)
    child.end(0.05)
    assert child.status() == -signal.SIGKILL


def test_a_child_reads_nothing(made: list[Child]) -> None:
    assert started(made, "import sys; raise SystemExit(len(sys.stdin.read()))").status(60) == 0
