"""Measure the systems in turns, each first in some of them, so that the machine's drift affects all alike."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from proof.bench.machine import OthersMeter
from systems.base import Sample, Start, System, Work
from systems.processes import tree_seconds

_PROMPTS_EACH = 1 << 14  # numbers set aside for the prompts of one turn
_MOST_PROMPTS = 1 << 20  # those from there on are for warming up

Turn = Mapping[str, Sample]
"""A measurement of each system, one after the other."""


@dataclass(frozen=True)
class Plan:
    """The parameters of a measurement.

    Attributes:
        clients: numbers of them; each is a `Point`.
        repeat: turns at each number.
        together: all systems run all the time. Otherwise one runs at a time, each turn restarts it, and no turn is
            repeated.
        quiet: cores of other processes up to which a turn is kept; else it is repeated, at most `repeat` times.
    """

    clients: Sequence[int]
    rounds: int
    tokens: int
    prompt_words: int
    processes: int
    repeat: int
    together: bool
    quiet: float

    def work(self, clients: int, turn: int) -> Work:
        first = turn * _PROMPTS_EACH % _MOST_PROMPTS
        return Work(clients, self.rounds, self.tokens, self.prompt_words, first, min(self.processes, clients))


@dataclass
class Point:
    """The turns at one number of clients, and how many were disturbed and made again."""

    clients: int
    turns: list[Turn]
    disturbed: int = 0


Abouts = dict[str, Mapping[str, str]]


def run(plan: Plan, starts: Mapping[str, Start]) -> tuple[list[Point], Abouts]:
    """Return all points, and the systems' settings."""
    return _together(plan, starts) if plan.together else _apart(plan, starts)


def _together(plan: Plan, starts: Mapping[str, Start]) -> tuple[list[Point], Abouts]:
    with contextlib.ExitStack() as stack:
        up: dict[str, System] = {}
        for name, start in starts.items():
            up[name] = stack.enter_context(_started(name, start))
        points = [_measure(plan, clients, up) for clients in plan.clients]
        return points, {name: system.about for name, system in up.items()}


def _measure(plan: Plan, clients: int, up: Mapping[str, System]) -> Point:
    for system in up.values():
        _settle(plan, clients, system)
    kept: list[Turn] = []
    disturbed: list[Turn] = []
    for number in range(2 * plan.repeat):
        turn = {name: _sample(plan.work(clients, number), name, up) for name in _rotated(list(up), number)}
        (disturbed if _others(turn) > plan.quiet else kept).append(turn)
        if len(kept) == plan.repeat:
            break
    disturbed.sort(key=_others)
    return Point(clients, kept + disturbed[: plan.repeat - len(kept)], len(disturbed))


def _apart(plan: Plan, starts: Mapping[str, Start]) -> tuple[list[Point], Abouts]:
    turns: list[dict[int, dict[str, Sample]]] = []
    abouts: Abouts = {}
    for number in range(plan.repeat):
        turns.append({clients: {} for clients in plan.clients})
        for name in _rotated(list(starts), number):
            with _started(name, starts[name]) as system:
                abouts[name] = system.about
                for clients in plan.clients:
                    _settle(plan, clients, system)
                    turns[-1][clients][name] = _sample(plan.work(clients, number), name, {name: system})
    points = []
    for clients in plan.clients:
        found = [turn[clients] for turn in turns]
        points.append(Point(clients, list(found), sum(_others(turn) > plan.quiet for turn in found)))
    return points, abouts


def _settle(plan: Plan, clients: int, system: System) -> None:
    """A round that is not counted: what a system does for the first time at this size is no part of a measure."""
    system.measure(replace(plan.work(clients, 2 * plan.repeat), rounds=1))


def _sample(work: Work, name: str, up: Mapping[str, System]) -> Sample:
    idle = [system.pid for other, system in up.items() if other != name]
    began, before, others = time.monotonic(), sum(map(tree_seconds, idle)), OthersMeter()
    sample = up[name].measure(work)
    cores = (sum(map(tree_seconds, idle)) - before) / (time.monotonic() - began)
    sample = sample._replace(others=others.cores() or 0.0, idle=cores)
    print(f"{work.clients:4} clients, {name}: {_brief(sample)}", file=sys.stderr, flush=True)
    return sample


def _brief(sample: Sample) -> str:
    cpu = ""
    if sample.used is not None:
        cpu = f", host {sum(sample.used.host.values()) / sample.tokens * 1e6:.1f} us/token"
    return f"{sample.rate:,.1f} tokens/s{cpu}, others {sample.others:.2f}, idle systems {sample.idle:.2f} cores"


def _others(turn: Turn) -> float:
    return max(sample.others + sample.idle for sample in turn.values())


def _rotated(names: list[str], number: int) -> list[str]:
    number %= len(names)
    return names[number:] + names[:number]


@contextlib.contextmanager
def _started(name: str, start: Start) -> Iterator[System]:
    print(f"starting {name} ...", file=sys.stderr, flush=True)
    began = time.monotonic()
    with start() as system:
        print(f"{name} is up after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        yield system
