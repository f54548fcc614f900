"""Medians and ratios of the repetitions of both benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence


def over_others(name: str, each: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """`name`'s figures as a part of the null handler's and of upstream's.

    The median of each turn's ratio, for a turn's figures are of one time: the machine's speed drifts.
    """
    return {
        f"over_{other}": statistics.median(a / b for a, b in zip(each[name], each[other], strict=True))
        for other in ("null", "upstream")
    }


def verdict(rows: Sequence[Mapping[str, object]], target: str) -> bool:
    """Whether all of our rows meet it, which is printed; what is not measured meets nothing."""
    judged = [row["met"] for row in rows if row["met"] is not None]
    met = bool(judged) and all(judged)
    print(f"{'met' if met else 'NOT MET' if judged else 'ours not measured'}: {target}\n")
    return met
