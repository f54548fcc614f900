"""Benchmark the time to the first token through DJL's Java side, in rolling batch and in async mode, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from djl import served
from djl.handlers import NULL, NULL_ASYNC, ours
from djl.served import Plan, Turn
from proof.bench.report import table

_LIMIT = 0.3  # seconds, for ours in async mode
_ASYNC_SINCE = (0, 31)


class Row(NamedTuple):
    """Medians of a handler's turns: seconds, tokens a second, CPU of the worker and its engine in us a token."""

    djl: str
    clients: int
    handler: str
    first_token: float
    first_token_each: Sequence[float]
    tokens_per_second: float
    worker_and_engine_us_per_token: float
    errors: dict[str, int]


def run(plan: Plan, pace: float) -> dict[str, Any]:
    """Measure and print the table; return this part of the JSON line.

    Args:
        pace: steps a second of our engine, 0 for as fast as it goes.
    """
    rows = []
    limited = ours("process", pace, asynchronous=True)
    for version in plan.versions:
        if tuple(int(part) for part in version.split(".")[:2]) < _ASYNC_SINCE:
            continue
        with served.servers(version, [NULL, NULL_ASYNC, ours("process", pace), limited]) as running:
            for clients in plan.clients:
                turns = served.measure_turns(plan, version, clients, running)
                rows += [_row(version, clients, name, own) for name, own in turns.items()]
    print(f"Time to the first token through DJL's Java side, medians, {plan.repeat} times:")
    print(_show(rows))
    judged = [row for row in rows if row.handler == limited.name]
    met = bool(judged) and all(row.first_token < _LIMIT and not row.errors for row in judged)
    print(f"{'met' if met else 'NOT MET'}: ours in async mode < {_LIMIT * 1000:g} ms, no errors\n")
    return {"tokens": plan.tokens, "pace": pace, "met": met, "rows": [row._asdict() for row in rows]}


def _row(version: str, clients: int, name: str, turns: Sequence[Turn]) -> Row:
    each = [turn.first_token for turn in turns]
    errors = {kind: sum(turn.errors.get(kind, 0) for turn in turns) for turn in turns for kind in turn.errors}
    rate, cpu = statistics.median(turn.rate for turn in turns), statistics.median(turn.cpu for turn in turns)
    return Row(version, clients, name, statistics.median(each), each, rate, cpu, errors)


def _show(rows: Sequence[Row]) -> str:
    head = ["DJL", "clients", "handler", "first token ms", "each", "tokens/s", "worker and engine us/token", "errors"]
    lines = []
    for row in rows:
        line = [row.djl, str(row.clients), row.handler, f"{row.first_token * 1000:.0f}"]
        line.append(" ".join(f"{seconds * 1000:.0f}" for seconds in row.first_token_each))
        line += [f"{row.tokens_per_second:,.0f}", f"{row.worker_and_engine_us_per_token:.1f}"]
        line.append(", ".join(f"{count} {kind}" for kind, count in row.errors.items()) or "0")
        lines.append(line)
    return table(head, lines)
