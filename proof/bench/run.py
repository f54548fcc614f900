"""Runs the measurement of `lmi bench`. Every load is repeated, alternating with the engine alone if requested."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from handler.config.loader import read_config
from handler.serving.engine import engine_spec
from proof.bench import machine, report
from proof.bench.client import Closed, Load, Target
from proof.bench.machine import OthersMeter
from proof.bench.processes import Offline, Work, lmi_serve, measure, option_arguments
from proof.bench.report import Advance, Point, Repetition, load_name, progress_bar

_PROMPTS_EACH = 1 << 14  # prompt numbers reserved for each repetition


@dataclass(frozen=True)
class BenchPlan:
    """The arguments of `lmi bench`."""

    loads: Sequence[Load]
    tokens: int
    url: str | None = None
    engine: str | None = None
    model: str | None = None
    options: Sequence[str] = ()
    prompt_words: int = 48
    timeout: float = 120.0
    processes: int = 2
    repeat: int = 3
    quiet: float = 0.2


def run(plan: BenchPlan, print_result: Callable[[dict[str, Any]], int]) -> int:
    """Measure, print the results, and return the exit status: 1 if a request failed or a file could not be written.

    Args:
        plan: the arguments of `lmi bench`.
        print_result: a function that prints the JSON document, and returns an exit status.
    """
    points = measure_all(plan)
    result = document(plan, points)
    print(machine.summary(result))
    show(plan, points, result)
    return print_result(result) or int(any(value["errors"] for value in result["results"]))


def show(plan: BenchPlan, points: Sequence[Point], result: dict[str, Any]) -> None:
    """Print the results as a table."""
    again = f", {plan.repeat} times" if plan.repeat > 1 else ""
    print(f"responses of {plan.tokens} tokens, prompts of {plan.prompt_words} words{again}")
    print(report.show(points, result["results"]))
    if any((value["others_cores"] or 0.0) > plan.quiet for value in result["results"]):
        print(f"DISTURBED: other processes used more than {plan.quiet:g} cores; see others_cores in the JSON line")


def document(plan: BenchPlan, points: Sequence[Point]) -> dict[str, Any]:
    """Return the results as a JSON document."""
    return {"plan": asdict(plan), "results": [report.summarize(point) for point in points], **machine.describe()}


def measure_all(plan: BenchPlan) -> list[Point]:
    with contextlib.ExitStack() as stack:
        advance = stack.enter_context(progress_bar(len(plan.loads) * plan.repeat))
        offline = stack.enter_context(_engine(plan)) if plan.engine else None
        url = plan.url or stack.enter_context(lmi_serve(option_arguments(_overrides(plan)))).url
        target = Target(url, plan.tokens, plan.prompt_words, plan.timeout)
        points = []
        for load in plan.loads:
            points.append(_measure(plan, target, load, offline, advance))
            _print_rate(points[-1])
    return points


def _print_rate(point: Point) -> None:
    values = report.summarize(point)
    ratio = f", served / engine {values['served_over_engine']:.3f}" if "served_over_engine" in values else ""
    print(f"{point.name}: {values['tokens_per_second']:.1f} tokens/s{ratio}", file=sys.stderr, flush=True)


def _measure(plan: BenchPlan, target: Target, load: Load, offline: Offline | None, advance: Advance) -> Point:
    """Measure `plan.repeat` repetitions, and repeat those that other processes disturbed."""

    def repetition(turn: int) -> Repetition:
        if turn < plan.repeat:
            advance(f"{load_name(load)}, repetition {turn + 1} of {plan.repeat}")
        return _repeat(plan, replace(target, first=turn * _PROMPTS_EACH), load, offline, turn)

    repetitions, disturbed = machine.undisturbed(
        plan.repeat, plan.quiet, repetition, lambda run: run.other_cores or 0.0
    )
    return Point(load, repetitions, disturbed)


def _repeat(plan: BenchPlan, target: Target, load: Load, offline: Offline | None, turn: int) -> Repetition:
    """Measure once. The speed of the machine may drift, so every other repetition measures the engine first."""
    meter = OthersMeter()
    if offline is None:
        return Repetition(measure(target, load, plan.processes), other_cores=meter.cores())
    assert isinstance(load, Closed)
    work = Work(load.clients, load.requests, target.tokens, target.prompt_words, target.first, load.seconds)
    before = offline.measure(work) if turn % 2 == 0 else None
    results = measure(target, load, plan.processes)
    return Repetition(results, before or offline.measure(work), meter.cores())


@contextlib.contextmanager
def _engine(plan: BenchPlan) -> Iterator[Offline]:
    """Yield an engine that is loaded with the same options as the engine of the server."""
    spec = engine_spec(read_config(overrides=_overrides(plan)).checked())
    with contextlib.closing(Offline(spec)) as offline:
        offline.wait_ready()
        yield offline


def _overrides(plan: BenchPlan) -> list[str]:
    overrides = list(plan.options)
    if plan.engine not in (None, "auto"):
        overrides.append(f"option.llm_engine={plan.engine}")
    if plan.model:
        overrides.append(f"option.model_id={plan.model}")
    return overrides
