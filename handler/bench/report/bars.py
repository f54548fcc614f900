"""The curves as bars in a terminal, for where matplotlib is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import IO, NamedTuple

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table

from handler.bench.report.curves import LATENCIES, Curve

_WIDTH = 40  # columns of the longest bar


class _Bar(NamedTuple):
    label: str
    kind: str
    value: float


def show(curves: Sequence[Curve], file: IO[str] | None = None) -> None:
    """Print throughput and latencies by load; without a terminal no control characters.

    Args:
        file: by default standard output.
    """
    console = Console(file=file, emoji=False, markup=False, highlight=False)
    groups = {"throughput [tokens/s]": list(_rates(curves))}
    for name, what in LATENCIES.items():
        groups[f"{what} [ms]"] = list(_times(curves, name))
    for title, bars in groups.items():
        if bars:
            console.print(title, style="bold")
            console.print(_table(bars))


def _table(bars: Sequence[_Bar]) -> Table:
    most = max(bar.value for bar in bars) or 1.0
    grid = Table.grid(padding=(0, 1))
    for column in range(3):
        grid.add_column(justify="right" if column == 2 else "left", no_wrap=True)
    grid.add_column(width=_WIDTH)
    for bar in bars:
        length = ProgressBar(
            total=most, completed=bar.value, width=_WIDTH, complete_style="cyan", finished_style="cyan"
        )
        grid.add_row(f"  {bar.label}", bar.kind, f"{bar.value:,.1f}", length)
    return grid


def _rates(curves: Sequence[Curve]) -> Iterator[_Bar]:
    for curve in curves:
        for level in curve.levels:
            yield _Bar(_label(curves, curve, curve.load_name(level)), "", level.tokens_per_second)


def _times(curves: Sequence[Curve], name: str) -> Iterator[_Bar]:
    for curve in curves:
        for level in curve.levels:
            for percentile in ("p50", "p99"):
                if (value := level.times[name].get(percentile)) is not None:
                    yield _Bar(_label(curves, curve, curve.load_name(level)), percentile, value)


def _label(curves: Sequence[Curve], curve: Curve, load: str) -> str:
    return f"{curve.name}, {load}" if len(curves) > 1 else load
