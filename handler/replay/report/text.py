"""The report for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from handler.bench.report.metrics import table

_MOST = 10  # findings of a class that the table names
_TIMES = {"first": "first byte", "gap": "between pieces", "total": "whole answer"}


def show(report: Mapping[str, Any]) -> str:
    """Return the report."""
    return "\n".join(_parts(report))


def _parts(report: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    for name, values in report["classes"].items():
        allowed = "" if values["allowed_percent"] is None else f"{values['allowed_percent']:g}"
        verdict = "beyond" if name in report["beyond"] else ""
        rows.append([name, f"{values['requests']:,}", f"{values['percent']:g}", allowed, verdict])
    yield table(["class", "requests", "%", "allowed %", ""], rows)
    yield from _findings(report["findings"])
    if times := list(_times(report["times_ms"])):
        yield "\n" + table(["milliseconds", "p50", "p90", "p99"], times)
    yield from _notes(report)
    for name, example in report["examples"].items():
        yield f"\n{name}: the smallest example, {example['id']}, {example['request']}"
        yield from (f"  {finding}" for finding in example["findings"])
        yield from (f"  {line}" for line in example["diff"])


def _findings(found: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    rows = [[cls, name, f"{count:,}"] for cls, names in found.items() for name, count in list(names.items())[:_MOST]]
    if rows:
        yield "\n" + table(["class", "what differs", "requests"], rows)


def _times(times: Mapping[str, Any]) -> Iterator[list[str]]:
    for name, what in _TIMES.items():
        for side, values in times.items():
            if values[name]["p50"] is not None:
                yield [f"{what}, {side}", *(f"{value:,.1f}" for value in values[name].values())]


def _notes(report: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    if count := report["unreadable"]["count"]:
        yield f"left out: {count:,}"
        yield from (f"  {one['place']}: {one['reason']}" for one in report["unreadable"]["first"])
    for side, count in report["throttled"].items():
        if count:
            yield f"the {side} was busy: {count:,} requests sent again"
    if volatile := report["volatile"]:
        yield f"volatile, not compared: {', '.join(sorted(volatile))}"
