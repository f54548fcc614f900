"""Turn samples into metrics, ratios and verdicts: the JSON line, and the tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from proof.bench.load import percentiles
from proof.bench.report import errors, first_token_times, gaps, table
from systems.base import Sample
from systems.turns import Point


class Names(NamedTuple):
    """Names of the three systems."""

    offline: str
    ours: str
    peer: str


class Target(NamedTuple):
    """A limit of a ratio; `clients`: the numbers of clients at which it counts, None: all."""

    ratio: str
    at_least: float | None = None
    at_most: float | None = None
    clients: Sequence[int] | None = None

    def judged(self, clients: int) -> bool:
        return self.clients is None or clients in self.clients

    def met(self, value: float | None) -> bool:
        """Whether a value meets the limit; False without a value."""
        if value is None:
            return False
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)

    def __str__(self) -> str:
        limit = f">= {self.at_least:g}" if self.at_least is not None else f"<= {self.at_most:g}"
        where = f" at {', '.join(map(str, self.clients))} clients" if self.clients else ""
        return f"{self.ratio.replace('_', ' ')} {limit}{where}"


ON_CPU = (
    Target("rate_over_peer", at_least=1.0),
    Target("host_cpu_over_peer", at_most=0.5),
    Target("largest_cpu_over_peer", at_most=1 / 3),
)
ON_GPU = (
    Target("rate_over_offline", at_least=0.98, clients=(128, 256)),
    Target("rate_over_peer", at_least=1.0),
    Target("itl_over_peer", at_most=1.0),
)


def summarize(point: Point, names: Names) -> dict[str, Any]:
    """Return the metrics of each system at one number of clients, and our ratios to the others.

    A ratio is the median of the turns' ratios, as the machine's speed drifts between turns.
    """
    measured = [name for name in names if name in point.turns[0]]
    value: dict[str, Any] = {
        "clients": point.clients,
        "systems": {name: _metrics([turn[name] for turn in point.turns]) for name in measured},
        "turns_disturbed": point.disturbed,
        "others_cores": max(sample.others for turn in point.turns for sample in turn.values()),
        "idle_systems_cores": max(sample.idle for turn in point.turns for sample in turn.values()),
    }
    ratios = {
        "rate_over_offline": (names.offline, lambda sample: sample.rate),
        "rate_over_peer": (names.peer, lambda sample: sample.rate),
        "itl_over_peer": (names.peer, mean_gap),
        "host_cpu_over_peer": (names.peer, host_cpu),
        "largest_cpu_over_peer": (names.peer, lambda sample: largest_cpu(sample)[1]),
    }
    for ratio, (other, figure) in ratios.items():
        each = _ratios(point, names.ours, other, figure)
        value[ratio] = statistics.median(each) if each else None
        value[f"{ratio}_each"] = each
    return value


def _ratios(point: Point, ours: str, other: str, figure: Callable[[Sample], float]) -> list[float]:
    if not {ours, other} <= set(point.turns[0]):
        return []
    return [figure(turn[ours]) / figure(turn[other]) for turn in point.turns]


def host_cpu(sample: Sample) -> float:
    """Return CPU microseconds per token of all processes but the engine's core."""
    assert sample.used is not None
    return sum(sample.used.host.values()) / sample.tokens * 1e6


def largest_cpu(sample: Sample) -> tuple[str, float]:
    """Return which of these processes takes most, and its microseconds per token."""
    assert sample.used is not None
    name, seconds = max(sample.used.host.items(), key=lambda item: item[1])
    return name, seconds / sample.tokens * 1e6


def mean_gap(sample: Sample) -> float:
    """Return milliseconds. Unlike the median, the mean does not fall when tokens wait and come together."""
    return statistics.fmean(gaps(sample.results)) * 1e3


def _metrics(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the metrics of one system."""
    each = [sample.rate for sample in samples]
    value: dict[str, Any] = {"tokens_per_second": statistics.median(each), "tokens_per_second_each": each}
    results = [result for sample in samples for result in sample.results]
    if results:
        value |= {
            "num_requests": len(results),
            "errors": errors(results),
            "ttft_ms": _milliseconds(first_token_times(results)),
            "itl_ms": _milliseconds(gaps(results)),
        }
    used = [sample.used for sample in samples if sample.used is not None]
    if used:
        value |= {
            "host_cpu_us": _median(map(host_cpu, samples)),
            "largest_cpu_us": _median(largest_cpu(sample)[1] for sample in samples),
            "largest_process": largest_cpu(samples[-1])[0],
            "engine_cpu_us": _median(sample.used.engine / sample.tokens * 1e6 for sample in samples if sample.used),
            "processes_cpu_us": [
                {name: seconds / sample.tokens * 1e6 for name, seconds in sample.used.host.items()}
                for sample in samples
                if sample.used
            ],
        }
    return value


def _milliseconds(seconds: Sequence[float]) -> dict[str, float | None]:
    values = [1e3 * value for value in seconds]
    return {**percentiles(values), "mean": statistics.fmean(values) if values else None}


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def failures(values: Sequence[dict[str, Any]]) -> int:
    """Count the failed requests of all systems."""
    systems = [system for value in values for system in value["systems"].values()]
    return sum(sum(system.get("errors", {}).values()) for system in systems)


def verdicts(values: Sequence[dict[str, Any]], targets: Sequence[Target]) -> list[tuple[str, bool]]:
    """Return each target, and whether it is met at every number of clients at which it counts."""
    result = []
    for target in targets:
        judged = [value[target.ratio] for value in values if target.judged(value["clients"])]
        result.append((str(target), bool(judged) and all(map(target.met, judged))))
    return result


# -- for people ------------------------------------------------------------------------------------------------------


def show_systems(values: Sequence[dict[str, Any]]) -> str:
    head = ["clients", "system", "tokens/s", "TTFT p50", "p99 ms", "ITL mean", "p50", "p99 ms"]
    head += ["host CPU us/token", "largest", "engine's", "errors"]
    rows = []
    for value in values:
        for name, system in value["systems"].items():
            row = [str(value["clients"]), name, f"{system['tokens_per_second']:,.1f}"]
            times = [("ttft_ms", "p50", 1), ("ttft_ms", "p99", 1)]
            times += [("itl_ms", which, 2) for which in ("mean", "p50", "p99")]
            row += [_cell(system.get(kind, {}).get(which), digits) for kind, which, digits in times]
            row.append(_cell(system.get("host_cpu_us"), 1))
            row.append(f"{_cell(system.get('largest_cpu_us'), 1)} {system.get('largest_process', '')}".strip())
            row.append(_cell(system.get("engine_cpu_us"), 0))
            kinds = ", ".join(f"{count} {kind}" for kind, count in system.get("errors", {}).items())
            rows.append([*row, kinds or ("0" if "errors" in system else "-")])
    return table(head, rows)


def show_ratios(values: Sequence[dict[str, Any]], names: Names) -> str:
    """Render our ratios to the others."""
    head = ["clients", f"tokens/s of {names.offline}", "each", f"tokens/s of {names.peer}", "each"]
    head += ["ITL", "host CPU", "largest process"]
    rows = []
    for value in values:
        row = [str(value["clients"])]
        for ratio in ("rate_over_offline", "rate_over_peer"):
            row += [_cell(value[ratio], 3), " ".join(f"{each:.3f}" for each in value[f"{ratio}_each"])]
        row += [_cell(value[f"{name}_over_peer"], 2) for name in ("itl", "host_cpu", "largest_cpu")]
        rows.append(row)
    return table(head, rows)


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
