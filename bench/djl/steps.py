"""Benchmark a worker's CPU time per streamed token, for every handler, version and number of requests, in turns."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from djl import environment, rolling
from djl.handlers import FREE, NULL, UPSTREAM, Handler, ours
from djl.ratios import over_others, verdict
from djl.rolling import Cost
from djl.worker import Worker, start
from proof.bench.report import table
from tests.djl import jars

_LEAST_TOKENS = 16384  # of one measurement as fast as it goes, so that it lasts a fraction of a second at any size
_NOTE = """\
Null, upstream, and ours on an engine that costs nothing: every step brings every request a token; the worker's CPU is
the handler's. Ours with echo in a process: the way real engines run; their CPU is not in the figure, the messages from
them are. As fast as it goes echo does not wait for the handler, and a step brings what has come since the last: many
tokens a request, which is cheap. At a pace it brings one, after a sleep more than the others'. With echo in a thread
its work is in the figure. Upstream's handler in DJL 0.25 writes no details."""


@dataclass(frozen=True)
class Plan:
    """`isolations` are those of our engine; `paces` are engine steps a second, 0 for as fast as it goes."""

    isolations: Sequence[str]
    versions: Sequence[str]
    sizes: Sequence[int]
    tokens: int
    paces: Sequence[float]
    repeat: int


@dataclass(frozen=True)
class _Point:
    """The conditions of one comparison."""

    version: str
    pace: float
    size: int

    def __str__(self) -> str:
        return f"DJL {self.version}, {self.pace or 'all'} steps/s, {self.size:3} requests a step"

    @property
    def target(self) -> float:
        """The largest cost allowed, as a multiple of upstream's handler's."""
        return 1.0 if self.size < 32 else 0.5


def run(plan: Plan) -> dict[str, Any]:
    """Measure and print the table; return this part of the JSON line."""
    rows: list[dict[str, Any]] = []
    for version, pace in itertools.product(plan.versions, plan.paces):
        compared = [NULL, UPSTREAM, FREE, *(ours(isolation, pace) for isolation in plan.isolations)]
        with _workers(version, compared) as workers:
            for size in plan.sizes:
                point = _Point(version, pace, size)
                rows += _summarize(point, compared, _measure(plan, point, compared, workers))
    print(f"CPU of the worker's process a streamed token, answers of {plan.tokens} tokens, {plan.repeat} times:")
    print(_show(rows))
    print(_NOTE)
    met = verdict(rows, "as fast as it goes, ours / upstream <= 0.5 at 32 and more requests a step, <= 1 at fewer")
    return {"tokens": plan.tokens, "repeat": plan.repeat, "met": met, "rows": rows}


@contextlib.contextmanager
def _workers(version: str, compared: Sequence[Handler]) -> Iterator[list[Worker]]:
    """Start and warm up a worker of each handler. They live side by side so that they can be measured in turns."""
    engine = jars.engine(version) / "python" / version
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="djl-step-")))
        workers = []
        for number, handler in enumerate(compared):
            model = handler.write(scratch / str(number))
            started = start(environment.worker_python(), engine, model, handler.options)
            workers.append(stack.enter_context(started))
            rolling.measure(workers[-1], 8, 32)
        yield workers


def _measure(
    plan: Plan, point: _Point, compared: Sequence[Handler], workers: Sequence[Worker]
) -> dict[str, list[Cost]]:
    rounds = 1 if point.pace else max(1, _LEAST_TOKENS // (point.size * plan.tokens))
    costs: dict[str, list[Cost]] = {handler.name: [] for handler in compared}
    for _ in range(plan.repeat):
        for handler, worker in zip(compared, workers, strict=True):
            pace = 0.0 if handler.paced else point.pace  # an engine of its own keeps it, as a real one would
            batches = [rolling.measure(worker, point.size, plan.tokens, pace) for _ in range(rounds)]
            cost = Cost(*map(sum, zip(*batches, strict=True)))
            costs[handler.name].append(cost)
            print(f"{point}, {handler.name}: {cost.microseconds:.2f} us", file=sys.stderr)
    return costs


def _summarize(point: _Point, compared: Sequence[Handler], costs: Mapping[str, Sequence[Cost]]) -> list[dict[str, Any]]:
    """Make a row for each handler."""
    each = {name: [cost.microseconds for cost in own] for name, own in costs.items()}
    rows = []
    for handler in compared:
        own = costs[handler.name]
        over = over_others(handler.name, each)
        row = {
            "djl": point.version,
            "pace": point.pace,
            "requests_a_step": point.size,
            "handler": handler.name,
            "worker_us_per_token": statistics.median(each[handler.name]),
            "worker_us_per_token_each": each[handler.name],
            "engine_us_per_token": statistics.median(cost.engine_microseconds for cost in own),
            "tokens_a_request_and_step": statistics.median(cost.tokens / cost.steps / point.size for cost in own),
            **over,
            "met": over["over_upstream"] <= point.target if handler.is_ours and not point.pace else None,
        }
        rows.append(row)
    return rows


def _show(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ["DJL", "steps/s", "requests a step", "handler", "worker us/token", "each", "engine's process us/token"]
    head += ["tokens a request and step", "of null", "of upstream", "met"]
    lines = []
    for row in rows:
        line = [row["djl"], f"{row['pace']:g}" if row["pace"] else "all", str(row["requests_a_step"]), row["handler"]]
        line.append(f"{row['worker_us_per_token']:.1f}")
        line.append(" ".join(f"{cost:.1f}" for cost in row["worker_us_per_token_each"]))
        line.append(f"{row['engine_us_per_token']:.1f}" if row["engine_us_per_token"] else "-")
        line.append(f"{row['tokens_a_request_and_step']:.2f}")
        line += [f"{row['over_null']:.2f}", f"{row['over_upstream']:.2f}"]
        line.append("-" if row["met"] is None else "yes" if row["met"] else "NO")
        lines.append(line)
    return table(head, lines)
