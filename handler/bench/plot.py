"""Plot the metrics. matplotlib is an optional extra."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from handler.bench.metrics import Point, first_token_times, gaps
from handler.core.errors import ConfigError


def is_installed() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def check_installed() -> None:
    """Check before the measurement that matplotlib is installed."""
    if not is_installed():
        raise ConfigError("the plot needs matplotlib: pip install '.[bench]' in lmi-handler's directory")


def save(path: Path, title: str, points: Sequence[Point], values: Sequence[dict[str, Any]]) -> None:
    """Save a plot of throughput by load, and of the distributions of first-token times and gaps."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    figure.suptitle(title)
    throughput, first, between = figure.subplots(1, 3)
    names = [point.name for point in points]
    throughput.plot(names, [value["tokens_per_second"] for value in values], "o-", label="served")
    if all("served_over_engine" in value for value in values):
        throughput.plot(names, [value["engine_tokens_per_second"] for value in values], "x--", label="engine alone")
        for name, value in zip(names, values, strict=True):
            text = f"{value['served_over_engine']:.2f}"
            throughput.annotate(text, (name, value["tokens_per_second"]), (0, -14), textcoords="offset points")
    throughput.set(ylabel="tokens/s", ylim=(0, None), title="throughput (median)")
    throughput.legend()
    for axes, title, times in (
        (first, "time to first token", first_token_times),
        (between, "time between tokens", gaps),
    ):
        for point in points:
            if found := times(point.results):
                axes.ecdf([1000 * seconds for seconds in found], label=point.name)
        axes.set(xlabel="ms", ylabel="share of requests" if axes is first else "share of tokens", title=title)
        axes.set_xscale("symlog", linthresh=1)
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
