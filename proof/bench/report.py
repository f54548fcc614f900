"""Output of `lmi bench` and `lmi deploy bench`: metrics, tables, comparisons, files, and a progress bar."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from handler.core.terminal import unescaped
from proof.bench.client import Closed, Load, Result, percentiles
from proof.bench.curves import Curve, Level
from proof.bench.processes import Run


class Repetition(NamedTuple):
    """One run of a load, and of the same work on the engine alone if requested.

    Attributes:
        results: results of the requests.
        engine: result of the engine alone, or None.
        other_cores: number of CPU cores that other processes kept busy, or None if unknown.
    """

    results: Sequence[Result]
    engine: Run | None = None
    other_cores: float | None = None


class Point(NamedTuple):
    """One load with its repetitions. `disturbed` counts the repetitions that other processes disturbed."""

    load: Load
    repetitions: Sequence[Repetition]
    disturbed: int = 0

    @property
    def name(self) -> str:
        return load_name(self.load)

    @property
    def results(self) -> list[Result]:
        return [result for repetition in self.repetitions for result in repetition.results]


def load_name(load: Load) -> str:
    if isinstance(load, Closed):
        return f"{load.clients} client{'s' * (load.clients > 1)}"
    return f"{load.rate:g} request{'s' * (load.rate != 1)}/s"


def tokens_per_second(results: Sequence[Result]) -> float:
    """Return the tokens per second between the start of the first request and the end of the last response."""
    tokens = sum(result.num_tokens for result in results)
    return tokens / (max(result.end for result in results) - min(result.start for result in results))


def first_token_times(results: Sequence[Result]) -> list[float]:
    """Return the time from the start of each request to its first token, in seconds."""
    return [result.arrivals[0] - result.start for result in results if result.arrivals]


def gaps(results: Sequence[Result]) -> list[float]:
    """Return the times between the tokens of each response, in seconds. They are 0 for tokens from the same read."""
    return [later - earlier for result in results for earlier, later in itertools.pairwise(result.arrivals)]


def response_times(results: Sequence[Result]) -> list[float]:
    """Return the time from start to end of each successful request, in seconds."""
    return [result.end - result.start for result in results if not result.error]


def errors(results: Sequence[Result]) -> dict[str, int]:
    """Return the number of failed requests for each kind of error."""
    return dict(Counter(result.error for result in results if result.error))


def summarize(point: Point) -> dict[str, Any]:
    """Return the results for a load as an entry of `results` in the JSON document."""
    served = [tokens_per_second(repetition.results) for repetition in point.repetitions]
    value: dict[str, Any] = {
        **asdict(point.load),
        "num_requests": len(point.results),
        "tokens_per_second": statistics.median(served),
        "tokens_per_second_each": served,
        "ttft_ms": _milliseconds(first_token_times(point.results)),
        "itl_ms": _milliseconds(gaps(point.results)),
        "latency_ms": _milliseconds(response_times(point.results)),
        "errors": errors(point.results),
        "others_cores": max((repetition.other_cores or 0.0 for repetition in point.repetitions), default=None),
        "repetitions_disturbed": point.disturbed,
    }
    engine = [repetition.engine.rate for repetition in point.repetitions if repetition.engine is not None]
    if engine:
        ratios = [ours / bare for ours, bare in zip(served, engine, strict=True)]
        value |= {
            "engine_tokens_per_second": statistics.median(engine),
            "engine_tokens_per_second_each": engine,
            "served_over_engine": statistics.median(ratios),
            "served_over_engine_each": ratios,
        }
    return value


def _milliseconds(seconds: Sequence[float]) -> dict[str, float | None]:
    return percentiles([1000 * value for value in seconds])


def show(points: Sequence[Point], values: Sequence[dict[str, Any]]) -> str:
    """Return the results of all loads as a table. Times are in milliseconds."""
    head = ["load", "requests", "tokens/s", "TTFT p50", "p90", "p99 ms", "ITL p50", "p90", "p99 ms", "errors"]
    if any("served_over_engine" in value for value in values):
        head += ["engine tokens/s", "served / engine", "each"]
    return table(head, [_row(point.name, value) for point, value in zip(points, values, strict=True)])


def _row(name: str, value: Mapping[str, Any]) -> list[str]:
    row = [name, str(value["num_requests"]), f"{value['tokens_per_second']:,.1f}"]
    row += [cell(value["ttft_ms"][percentile], 1) for percentile in ("p50", "p90", "p99")]
    row += [cell(value["itl_ms"][percentile], 2) for percentile in ("p50", "p90", "p99")]
    row.append(", ".join(f"{count} {kind}" for kind, count in value["errors"].items()) or "0")
    if "served_over_engine" in value:
        row += [f"{value['engine_tokens_per_second']:,.1f}", f"{value['served_over_engine']:.3f}"]
        row.append(" ".join(f"{ratio:.3f}" for ratio in value["served_over_engine_each"]))
    return row


def cell(value: float | None, digits: int = 1) -> str:
    """Format a number as a cell of a table. None becomes `-`."""
    return "-" if value is None else f"{value:,.{digits}f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table in Markdown, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return "\n".join([line(head), rule, *map(line, rows)])


# -- a table that compares several measurements with the first one, by load --------------------------------------------


_ROWS = {
    "TTFT p50 [ms]": ("ttft_ms", "p50"),
    "TTFT p99 [ms]": ("ttft_ms", "p99"),
    "ITL p50 [ms]": ("itl_ms", "p50"),
    "ITL p99 [ms]": ("itl_ms", "p99"),
    "response p50 [ms]": ("latency_ms", "p50"),
    "response p99 [ms]": ("latency_ms", "p99"),
}
_OTHERWISE = {"subject": "measured", "work": "requests", "machine": "machine", "taken": "time"}
"""Labels for the fields of `Curve` that are listed below the table if they differ between curves."""


_NOISE, _DISTURBED = "~", "!"


def compare(curves: Sequence[Curve]) -> str:
    """Return a table, with an explanation of its marks and a list of other differences between the measurements.

    A cell is `-` if the load was not measured. The mark `~` means that the ranges of the repetitions overlap, so a
    difference may be due to chance. The mark `!` means that other processes disturbed the measurement.
    """
    by_load = [{curve.load_name(level): level for level in curve.levels} for curve in curves]
    rows: list[list[str]] = []
    for name in sorted({name for levels in by_load for name in levels}, key=lambda name: float(name.partition(" ")[0])):
        rows += _load_rows(name, curves, [levels.get(name) for levels in by_load])
    table_text = table(["load", "", *(curve.name for curve in curves)], rows)
    return "\n".join([table_text, *_legend(table_text, curves), *_differences(curves)])


def _load_rows(load: str, curves: Sequence[Curve], levels: Sequence[Level | None]) -> Iterator[list[str]]:
    """Yield the rows of one load."""
    yield [load, "tokens/s", *_rates(curves, levels)]
    for label, (time, percentile) in _ROWS.items():
        values = [None if level is None else level.times[time].get(percentile) for level in levels]
        yield ["", label, *_cells(values)]
    if any(level is not None and level.num_errors for level in levels):
        yield ["", "failed requests", *("-" if level is None else str(level.num_errors) for level in levels)]


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


def _legend(table_text: str, curves: Sequence[Curve]) -> Iterator[str]:
    """Yield lines that explain the marks in the table, or why there are none."""
    if f" {_NOISE} " in table_text:
        yield f"{_NOISE} within noise: the repetitions overlap with those of the first column"
    if f" {_DISTURBED} " in table_text:
        yield f"{_DISTURBED} disturbed: other processes kept more cores busy than --quiet allows; measure again"
    if once := [curve.name for curve in curves if all(len(level.each) < 2 for level in curve.levels)]:
        yield f"noise unknown for {', '.join(once)}, because it was measured once"


def _overlap(first: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether the ranges of two sets of repetitions overlap. A single repetition never overlaps."""
    repeated = min(len(first), len(other)) > 1
    return repeated and max(min(first), min(other)) <= min(max(first), max(other))


def _cells(values: Sequence[float | None]) -> list[str]:
    """Format values as cells. All cells except the first show the change relative to the first in percent."""
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
                yield f"{name}, {word}: {value or 'unknown'}"


# -- arguments of `lmi bench` and `lmi deploy bench` for the output of results -----------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the output of results."""
    parser.add_argument_group("report").add_argument(
        "--output", type=Path, metavar="FILE", help="also write the line of JSON to this file, for --compare"
    )


def print_result(output: Path | None, document: Mapping[str, Any]) -> int:
    """Save the document to `output`, and print it. Return 1 if the file cannot be written, else 0."""
    line = json.dumps(document)
    status = 0 if output is None else _write(output, line + "\n")
    print(line)
    return status


def _write(path: Path, text: str) -> int:
    """Write a file and print its name. Errors are printed instead of raised, so that the measurement is not lost."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except OSError as error:
        print(f"cannot write {path}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"written: {path}")
    return 0


# -- a progress bar, which is only shown on a terminal -----------------------------------------------------------------


Advance: TypeAlias = Callable[[str], None]
"""A function to call with the name of a step when that step begins and the previous one is complete."""


@contextlib.contextmanager
def progress_bar(steps: int) -> Iterator[Advance]:
    """Show a progress bar if standard error is a terminal and rich is installed. The bar disappears at the end.

    Args:
        steps: number of steps, which equals the number of calls to the yielded function.
    """
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda step: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=unescaped(sys.stderr)), transient=True) as bar:
        task = bar.add_task("starting", total=steps)
        begun = 0

        def advance(step: str) -> None:
            nonlocal begun
            bar.update(task, description=step, completed=begun)
            begun += 1

        yield advance
