"""Handle Ctrl-C and SIGTERM while AWS is being changed: report how far the run came."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from deploy.deployer.apply import Run


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM raise `Terminated`, as SIGINT raises KeyboardInterrupt."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def status_of(interrupt: KeyboardInterrupt) -> int:
    """Return the exit status as shells count it: 128 plus the signal's number."""
    return 128 + (signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT)


def interruption_report(run: Run, again: str, name: str) -> str:
    """Return one line each on the current step, the created resources, and the commands to continue or to clean up."""
    lines = ["Interrupted."]
    if run.current is not None:
        lines.append(f"At: {run.current.key}; AWS goes on with what it has begun.")
    if run.created:
        lines.append(f"Made in this run: {', '.join(run.created)}.")
    lines.append(f"To go on, run `lmi deploy {again}` again; to remove everything, `lmi deploy down --name {name}`.")
    return "\n".join(lines)
