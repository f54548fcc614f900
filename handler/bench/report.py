"""Percentiles and tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

PERCENTILES = (50, 90, 99)


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Return p50, p90 and p99 by linear interpolation; None without values."""
    if not values:
        return {f"p{percent}": None for percent in PERCENTILES}
    if len(values) == 1:
        return {f"p{percent}": values[0] for percent in PERCENTILES}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"p{percent}": cuts[percent - 1] for percent in PERCENTILES}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned table in Markdown."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return "\n".join([line(head), rule, *map(line, rows)])
