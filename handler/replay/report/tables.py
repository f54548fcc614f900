"""The report's tables and notes, as the terminal and the page both show them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

BEYOND = "beyond"
"""The last cell of a class that has more requests than allowed."""

_TIMES = {"first": "first byte", "gap": "between pieces", "total": "whole answer"}


class Table(NamedTuple):
    """A table; without rows there is nothing to show."""

    head: Sequence[str]
    rows: list[list[str]]


def classes(report: Mapping[str, Any]) -> Table:
    rows = []
    for name, values in report["classes"].items():
        allowed = "" if values["allowed_percent"] is None else f"{values['allowed_percent']:g}"
        verdict = BEYOND if name in report["beyond"] else ""
        rows.append([name, f"{values['requests']:,}", f"{values['percent']:g}", allowed, verdict])
    return Table(["class", "requests", "%", "allowed %", ""], rows)


def findings(report: Mapping[str, Any], most: int | None = None) -> Table:
    """Return what differs.

    Args:
        most: findings of a class; None: all.
    """
    rows = [
        [cls, name, f"{count:,}"]
        for cls, names in report["findings"].items()
        for name, count in list(names.items())[:most]
    ]
    return Table(["class", "what differs", "requests"], rows)


def times(report: Mapping[str, Any]) -> Table:
    """Return the times that were measured."""
    rows = [
        [f"{what}, {side}", *(f"{value:,.1f}" for value in values[name].values())]
        for name, what in _TIMES.items()
        for side, values in report["times_ms"].items()
        if values[name]["p50"] is not None
    ]
    return Table(["milliseconds", "p50", "p90", "p99"], rows)


def notes(report: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield what else is to be said, each with its list, which may be empty."""
    if count := report["unreadable"]["count"]:
        yield f"left out: {count:,}", [f"{one['place']}: {one['reason']}" for one in report["unreadable"]["first"]]
    for side, count in report["throttled"].items():
        if count:
            yield f"the {side} was busy; retries: {count:,}", []
    if volatile := report["volatile"]:
        yield "volatile, not compared", sorted(volatile)


def example_lines(example: Mapping[str, Any]) -> list[str]:
    """Return an example's findings, and its request where content is shown."""
    body = example.get("body")
    return [*example["findings"], *([f"request: {body}"] if body else [])]
