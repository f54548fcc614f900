"""Metrics of a load: throughput, latencies, errors; as a table and as JSON."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from handler.bench.load import Closed, Load, Result, percentiles
from handler.bench.offline import Run


class Repetition(NamedTuple):
    """One run of a load, and of the same work on the bare engine if requested.

    `others`: cores that other processes kept busy meanwhile.
    """

    results: Sequence[Result]
    engine: Run | None = None
    others: float | None = None


class Point(NamedTuple):
    """One load with its repetitions; `disturbed`: how often other processes caused a repetition."""

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
    """Return tokens a second from the first request's start to the last answer's end, as for the bare engine."""
    tokens = sum(result.num_tokens for result in results)
    return tokens / (max(result.end for result in results) - min(result.start for result in results))


def first_token_times(results: Sequence[Result]) -> list[float]:
    """Return the seconds from each request's start to its first token."""
    return [result.arrivals[0] - result.start for result in results if result.arrivals]


def gaps(results: Sequence[Result]) -> list[float]:
    """Return the seconds between tokens of an answer, as the client received them; 0 for tokens in one read."""
    return [later - earlier for result in results for earlier, later in itertools.pairwise(result.arrivals)]


def answer_times(results: Sequence[Result]) -> list[float]:
    """Return the seconds from each request's start to the end of its answer, of answers without an error."""
    return [result.end - result.start for result in results if not result.error]


def errors(results: Sequence[Result]) -> dict[str, int]:
    """Return the number of errors by kind."""
    return dict(Counter(result.error for result in results if result.error))


def summarize(point: Point) -> dict[str, Any]:
    """Return one entry of `results` in the JSON line."""
    served = [tokens_per_second(repetition.results) for repetition in point.repetitions]
    value: dict[str, Any] = {
        **asdict(point.load),
        "num_requests": len(point.results),
        "tokens_per_second": statistics.median(served),
        "tokens_per_second_each": served,
        "ttft_ms": _milliseconds(first_token_times(point.results)),
        "itl_ms": _milliseconds(gaps(point.results)),
        "latency_ms": _milliseconds(answer_times(point.results)),
        "errors": errors(point.results),
        "others_cores": max((repetition.others or 0.0 for repetition in point.repetitions), default=None),
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
    """Return the table for people; times in milliseconds."""
    head = ["load", "requests", "tokens/s", "TTFT p50", "p90", "p99 ms", "ITL p50", "p90", "p99 ms", "errors"]
    compared = any("served_over_engine" in value for value in values)
    if compared:
        head += ["engine tokens/s", "served / engine", "each"]
    rows = []
    for point, value in zip(points, values, strict=True):
        kinds = ", ".join(f"{count} {kind}" for kind, count in value["errors"].items())
        row = [point.name, str(value["num_requests"]), f"{value['tokens_per_second']:,.1f}"]
        row += [_cell(value["ttft_ms"][name], 1) for name in ("p50", "p90", "p99")]
        row += [_cell(value["itl_ms"][name], 2) for name in ("p50", "p90", "p99")]
        row.append(kinds or "0")
        if compared:
            row += [f"{value['engine_tokens_per_second']:,.1f}", f"{value['served_over_engine']:.3f}"]
            row.append(" ".join(f"{ratio:.3f}" for ratio in value["served_over_engine_each"]))
        rows.append(row)
    return table(head, rows)


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned table in Markdown."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return "\n".join([line(head), rule, *map(line, rows)])
