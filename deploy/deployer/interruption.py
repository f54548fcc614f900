"""Ctrl-C and SIGTERM while AWS is being changed: one way out, which says where things stand."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from deploy.deployer.apply import Run


class Terminated(KeyboardInterrupt):
    """SIGTERM."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Within it SIGTERM raises `Terminated`, as SIGINT raises KeyboardInterrupt."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def status_of(interrupt: KeyboardInterrupt) -> int:
    """As shells count: 128 and the signal's number."""
    return 128 + (signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT)


def interruption_report(run: Run, again: str, name: str) -> str:
    """What is left, and how to go on, a line each."""
    lines = ["Interrupted."]
    if run.at is not None:
        lines.append(f"At: {run.at.key}; AWS goes on with what it has begun.")
    if run.made:
        lines.append(f"Made in this run: {', '.join(run.made)}.")
    lines.append(f"To go on, run `lmi deploy {again}` again; to remove everything, `lmi deploy down --name {name}`.")
    return "\n".join(lines)
