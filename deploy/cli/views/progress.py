"""Print the progress of waiting: live lines on a terminal, else a line whenever something changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.cli.console import say
from deploy.deployer.wait import Progress, Report
from deploy.resources.resource import FAILED, MIXED, READY

_GOOD, _BAD = (*READY, ""), (*FAILED, *MIXED)


@contextmanager
def live_progress(console: Console) -> Iterator[Report]:
    """Yield a `report` for `wait_for`; its last state stays on the screen."""
    if not console.is_terminal:
        yield _plain(console)
        return
    newest: dict[str, Progress] = {}
    with Live(console=console, refresh_per_second=4) as live:

        def report(progress: Progress) -> None:
            newest[progress.key] = progress
            live.update(table(newest.values()))

        yield report


def table(states: Iterable[Progress]) -> Table:
    """Return a row for each resource, with its log's last line below."""
    grid = Table.grid(padding=(0, 2))
    for state in states:
        grid.add_row(_mark(state), state.key, Text(_sentence(state)), _minutes(state.elapsed))
        for below in (state.log, state.hint):
            if below:
                grid.add_row("", "", Text(below, style="dim", overflow="ellipsis", no_wrap=below is state.log), "")
    return grid


def _plain(console: Console) -> Report:
    newest: dict[str, tuple[str, str, str]] = {}

    def report(progress: Progress) -> None:
        now = (progress.phase, progress.log, progress.hint)
        before = newest.get(progress.key)
        newest[progress.key] = now
        if now == before:
            return
        if before is None or before[0] != progress.phase:
            say(console, f"{_minutes(progress.elapsed)} {progress.key}: {_sentence(progress)}")
        for old, new in zip(before[1:] if before else ("", ""), now[1:], strict=True):
            if new and new != old:
                say(console, f"        {new}")

    return report


def _sentence(progress: Progress) -> str:
    return f"{progress.phase} ({progress.status})" if progress.status else progress.phase


def _mark(progress: Progress) -> Text:
    if progress.status in _GOOD:
        return Text("✓", style="green")
    return Text("✗", style="red") if progress.status in _BAD else Text("…", style="yellow")


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60:3d}:{int(seconds) % 60:02d}"
