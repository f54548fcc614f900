"""The progress of a measurement: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import TypeAlias

Advance: TypeAlias = Callable[[str], None]
"""Name the step that begins; the one before it is complete."""


@contextlib.contextmanager
def progress_bar(steps: int) -> Iterator[Advance]:
    """Show a bar on standard error if that is a terminal and rich is installed; it disappears at the end.

    Args:
        steps: how often the function will be called.
    """
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda step: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=steps)
        begun = 0

        def advance(step: str) -> None:
            nonlocal begun
            bar.update(task, description=step, completed=begun)
            begun += 1

        yield advance
