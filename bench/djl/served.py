"""Benchmark tokens a second through DJL's Java side, for every handler and number of clients, in turns."""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cpu import cpu_seconds

from djl import environment
from djl.handlers import FREE, NULL, UPSTREAM, Handler, ours
from djl.ratios import over_others, verdict
from proof.bench import report
from proof.bench.client import Target
from proof.bench.load import Closed
from proof.bench.machine import OthersMeter
from proof.bench.processes import measure
from proof.bench.report import table
from tests.djl.servers import DjlServer
from tests.environment import clean_environment

TARGET = 0.95
_READY = 60.0  # seconds
_QUIET = 0.2
_NOTE = """\
Null and upstream send a token a step. Our engine runs as fast as it goes and does not wait for the Java side, so that a
step brings all that has come since the last, and the ratios have that gain in them. Tokens a read are what a client
own together: DJL 0.25 itself joins four steps, and a busy client reads late."""


@dataclass(frozen=True)
class Plan:
    """`isolations` are those of our engine; `processes` are the load generator's.

    `seconds` is how long each measurement's clients go on asking.
    """

    isolations: Sequence[str]
    versions: Sequence[str]
    clients: Sequence[int]
    tokens: int
    seconds: float
    processes: int
    repeat: int


class Turn(NamedTuple):
    """A measurement.

    Attributes:
        rate: tokens a second.
        first_token: seconds to the first one; the requests' median.
        cpu: the worker's and its children's, in microseconds a token.
        joined: tokens that a client got in one read.
        others: cores that other processes kept busy.
    """

    rate: float
    first_token: float
    cpu: float
    joined: float
    errors: dict[str, int]
    others: float


def run(plan: Plan) -> dict[str, Any]:
    """Measure and print the table; return this part of the JSON line."""
    rows: list[dict[str, Any]] = []
    compared = [NULL, UPSTREAM, FREE, *map(ours, plan.isolations)]
    for version in plan.versions:
        with servers(version, compared) as running:
            for clients in plan.clients:
                rows += _summarize(version, clients, compared, measure_turns(plan, version, clients, running))
    print(
        f"Tokens/s through DJL's Java side, clients that stream, answers of {plan.tokens} tokens, {plan.repeat} times:"
    )
    print(_show(rows))
    print(_NOTE)
    if any(row["others_cores"] > _QUIET for row in rows):
        print(f"DISTURBED: other processes took more than {_QUIET:g} of a core")
    met = verdict(rows, f"ours / null >= {TARGET}, ours / upstream > 1, no errors")
    return {
        "tokens": plan.tokens,
        "seconds": plan.seconds,
        "load_processes": plan.processes,
        "repeat": plan.repeat,
        "target": TARGET,
        "met": met,
        "rows": rows,
    }


@contextlib.contextmanager
def servers(version: str, compared: Sequence[Handler]) -> Iterator[dict[str, DjlServer]]:
    """A DJL for each handler. They live side by side so that they can be measured in turns; idle ones cost nothing."""
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="djl-served-")))
        running = {}
        for number, handler in enumerate(compared):
            own = scratch / str(number)
            model = handler.write(own / "model")
            env = {**clean_environment(), "PYTHON_EXECUTABLE": str(environment.worker_python())}
            server = DjlServer.start(None, version, own, model, env=env)
            stack.callback(server.stop)
            server.wait_ready(_READY)
            running[handler.name] = server
        yield running


def measure_turns(plan: Plan, version: str, clients: int, running: Mapping[str, DjlServer]) -> dict[str, list[Turn]]:
    turns: dict[str, list[Turn]] = {name: [] for name in running}
    for number in range(plan.repeat + 1):
        for name, server in running.items():
            turn = _turn(plan, clients, server)
            if number == 0:
                continue  # Java compiles what it finds hot only after a while
            turns[name].append(turn)
            print(f"DJL {version}, {clients:3} clients, {name}: {turn.rate:,.0f} tokens/s", file=sys.stderr)
    return turns


def _turn(plan: Plan, clients: int, server: DjlServer) -> Turn:
    worker, meter = server.worker_pid(), OthersMeter()
    before = cpu_seconds(worker)
    results = measure(Target(server.url, plan.tokens), Closed(clients, seconds=plan.seconds), plan.processes)
    tokens = sum(len(result.arrivals) for result in results)
    cpu = (cpu_seconds(worker) - before) / tokens * 1e6
    joined = tokens / sum(len(set(result.arrivals)) for result in results)
    first = statistics.median(report.first_token_times(results))
    rate, errors = report.tokens_per_second(results), report.errors(results)
    return Turn(rate, first, cpu, joined, errors, meter.cores() or 0.0)


def _summarize(
    version: str, clients: int, compared: Sequence[Handler], turns: Mapping[str, Sequence[Turn]]
) -> list[dict[str, Any]]:
    """Make a row for each handler."""
    each = {name: [turn.rate for turn in own] for name, own in turns.items()}
    rows = []
    for handler in compared:
        own = turns[handler.name]
        over = over_others(handler.name, each)
        errors: Counter[str] = sum((Counter(turn.errors) for turn in own), Counter())
        met = over["over_null"] >= TARGET and over["over_upstream"] > 1 and not errors
        row = {
            "djl": version,
            "clients": clients,
            "handler": handler.name,
            "tokens_per_second": statistics.median(each[handler.name]),
            "tokens_per_second_each": each[handler.name],
            "worker_and_engine_us_per_token": statistics.median(turn.cpu for turn in own),
            "tokens_a_read": statistics.median(turn.joined for turn in own),
            **over,
            "errors": dict(errors),
            "others_cores": max(turn.others for turn in own),
            "met": met if handler.is_ours else None,
        }
        rows.append(row)
    return rows


def _show(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ["DJL", "clients", "handler", "tokens/s", "each", "of null", "of upstream", "tokens a read"]
    head += ["worker and engine us/token", "others, cores", "errors", "met"]
    lines = []
    for row in rows:
        line = [row["djl"], str(row["clients"]), row["handler"], f"{row['tokens_per_second']:,.0f}"]
        line.append(" ".join(f"{rate:,.0f}" for rate in row["tokens_per_second_each"]))
        line += [f"{row['over_null']:.2f}", f"{row['over_upstream']:.2f}", f"{row['tokens_a_read']:.1f}"]
        line += [f"{row['worker_and_engine_us_per_token']:.1f}", f"{row['others_cores']:.2f}"]
        line.append(", ".join(f"{count} {kind}" for kind, count in row["errors"].items()) or "0")
        line.append("-" if row["met"] is None else "yes" if row["met"] else "NO")
        lines.append(line)
    return table(head, lines)
