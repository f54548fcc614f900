"""The report for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from handler.bench.report.metrics import table
from handler.replay.report import tables

_MOST = 10  # findings of a class that the table names


def show(report: Mapping[str, Any]) -> str:
    """Return the report."""
    return "\n".join(_parts(report))


def _parts(report: Mapping[str, Any]) -> Iterator[str]:
    yield table(*tables.classes(report))
    for part in (tables.findings(report, _MOST), tables.times(report)):
        if part.rows:
            yield "\n" + table(*part)
    yield ""
    for note, items in tables.notes(report):
        yield note
        yield from (f"  {item}" for item in items)
    for name, example in report["examples"].items():
        yield f"\n{name}: the smallest example, {example['id']}, {example['request']}"
        yield from (f"  {line}" for line in (*tables.example_lines(example), *example["diff"]))
