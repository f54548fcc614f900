"""Medians and ratios of the repetitions of both benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence


def over_others(name: str, each: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return a handler's ratios to the null handler and to upstream's.

    Each is the median of the turns' ratios, as the machine's speed drifts between turns.
    """
    return {
        f"over_{other}": statistics.median(a / b for a, b in zip(each[name], each[other], strict=True))
        for other in ("null", "upstream")
    }


def verdict(rows: Sequence[Mapping[str, object]], target: str) -> bool:
    """Print and return whether all of our rows meet the target; False without a measurement."""
    judged = [row["met"] for row in rows if row["met"] is not None]
    met = bool(judged) and all(judged)
    print(f"{'met' if met else 'NOT MET' if judged else 'ours not measured'}: {target}\n")
    return met
