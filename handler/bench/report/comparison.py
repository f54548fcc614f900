"""A table of several measurements by load: each beside the first one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from handler.bench.report.curves import Curve, Level
from handler.bench.report.metrics import table

_ROWS = {
    "TTFT p50 [ms]": ("ttft_ms", "p50"),
    "TTFT p99 [ms]": ("ttft_ms", "p99"),
    "ITL p50 [ms]": ("itl_ms", "p50"),
    "ITL p99 [ms]": ("itl_ms", "p99"),
    "answer p50 [ms]": ("latency_ms", "p50"),
    "answer p99 [ms]": ("latency_ms", "p99"),
}
_OTHERWISE = {"subject": "measured", "work": "requests", "machine": "machine", "taken": "time"}
"""Fields of `Curve` whose differences the lines below the table name, by the words there."""


_NOISE, _DISTURBED = "~", "!"


def show(curves: Sequence[Curve]) -> str:
    """Return the table, and below it what its marks mean and what makes the measurements hard to compare.

    A load that only some have has `-` for the others. `~`: the repetitions' ranges overlap, so it may be chance.
    `!`: other processes disturbed it.
    """
    names = list(dict.fromkeys(curve.load_name(level) for curve in curves for level in curve.levels))
    names.sort(key=lambda name: float(name.partition(" ")[0]))
    by_load = [{curve.load_name(level): level for level in curve.levels} for curve in curves]
    rows = []
    for name in names:
        levels = [found.get(name) for found in by_load]
        rows.append([name, "tokens/s", *_rates(curves, levels)])
        for label, (time, percentile) in _ROWS.items():
            values = [None if level is None else level.times[time].get(percentile) for level in levels]
            rows.append(["", label, *_cells(values)])
        if any(level is not None and level.num_errors for level in levels):
            rows.append(["", "failed requests", *("-" if it is None else str(it.num_errors) for it in levels)])
    shown = table(["load", "", *(curve.name for curve in curves)], rows)
    return "\n".join([shown, *_legend(shown, curves), *_differences(curves)])


def _rates(curves: Sequence[Curve], levels: Sequence[Level | None]) -> Iterator[str]:
    first = levels[0]
    rates = [None if level is None else level.tokens_per_second for level in levels]
    for curve, level, cell in zip(curves, levels, _cells(rates), strict=True):
        marks = []
        if level and curve.is_disturbed(level):
            marks.append(_DISTURBED)
        if level and first and level is not first and _overlap(first.each, level.each):
            marks.append(_NOISE)
        yield " ".join([*marks, cell])


def _legend(shown: str, curves: Sequence[Curve]) -> Iterator[str]:
    """Say what the marks in the table mean, and where they could not be set."""
    if f" {_NOISE} " in shown:
        yield f"{_NOISE} within noise: its repetitions and the first column's overlap"
    if f" {_DISTURBED} " in shown:
        yield f"{_DISTURBED} disturbed: other processes kept more cores busy than --quiet allows; measure it again"
    if once := [curve.name for curve in curves if all(len(level.each) < 2 for level in curve.levels)]:
        yield f"noise not known of {', '.join(once)}: measured once"


def _overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the ranges of two sets of repetitions overlap; not known of one repetition."""
    repeated = min(len(one), len(other)) > 1
    return repeated and max(min(one), min(other)) <= min(max(one), max(other))


def _cells(values: Sequence[float | None]) -> list[str]:
    """Write values, and the change from the first one in percent."""
    first, *_ = values
    cells = []
    for index, value in enumerate(values):
        cell = "-" if value is None else f"{value:,.1f}"
        if index and value is not None and first:
            cell += f" ({value / first - 1:+.1%})"
        cells.append(cell)
    return cells


def _differences(curves: Sequence[Curve]) -> Iterator[str]:
    for field, word in _OTHERWISE.items():
        values = {curve.name: getattr(curve, field) for curve in curves}
        if len(set(values.values())) > 1:
            for name, value in values.items():
                yield f"{name}, {word}: {value or 'not known'}"
