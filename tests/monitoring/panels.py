"""The dashboard's panels as pictures: the answers of a real Prometheus that scraped a server under `lmi bench`.

`python -m tests.monitoring.panels` writes docs/images/monitoring; it takes two minutes.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from os import kill
from pathlib import Path
from typing import Any

import matplotlib
import yaml
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from tests.monitoring.prometheus import Prometheus, prometheus
from tests.servers import ServerProcess, options, serve

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "monitoring"
PICTURES = ROOT / "docs" / "images" / "monitoring"
ROWS = ("traffic", "latency", "requests", "engine", "servers")
"""Names of the pictures: one for each row of the dashboard."""

_STYLE = {
    "text.parse_math": False,  # do not interpret a `$` in a name
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "lines.markersize": 5,
    "legend.framealpha": 0.85,
    "legend.fontsize": 9,
}
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
_UNITS = {"reqps": "requests/s", "s": "seconds", "percentunit": "", "short": ""}
_SUFFIX = "suffix:"  # begins a unit of Grafana's that is written as it is
_OPTIONS = ("option.kv_cache_gib=1", "option.max_rolling_batch_size=8")
_CLIENTS = (2, 8, 16)
_SECONDS = 25
_ENGINE_ENDS = 5.0  # seconds before the end of the last load


@dataclass(frozen=True)
class Mark:
    """A time (seconds since 1970) at which something began."""

    at: float
    text: str


Series = tuple[str, list[float], list[float]]
"""Name, times (seconds since 1970) and values; NaN where there is none."""


def expression(query: str, interval: str) -> str:
    """Return a query of the dashboard with Grafana's variables filled in."""
    return query.replace("$__rate_interval", interval).replace("$instance", ".+")


def configuration(target: str, interval: str, directory: Path, *more: str) -> Path:
    """Write the example's configuration for a server, which is scraped more often; the alerts lie beside it.

    Args:
        more: other servers, with their addresses as instances.
    """
    config = yaml.safe_load((EXAMPLES / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": interval, "evaluation_interval": interval}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target], "labels": {"instance": "localhost:8080"}}]
    config["scrape_configs"][0]["static_configs"].append({"targets": [*more]})
    (directory / "alerts.yml").write_text((EXAMPLES / "alerts.yml").read_text())
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def panels() -> list[dict[str, Any]]:
    found = json.loads((EXAMPLES / "grafana-dashboard.json").read_text())["panels"]
    return sorted(found, key=lambda panel: (panel["gridPos"]["y"], panel["gridPos"]["x"]))


def save(server: Prometheus, begin: float, end: float, marks: Sequence[Mark], directory: Path, interval: str) -> None:
    """Save a picture of each row of the dashboard."""
    begin, end = math.floor(begin), math.floor(end)
    rows = [list(row) for _, row in groupby(panels(), key=lambda panel: panel["gridPos"]["y"])]
    with matplotlib.rc_context(_STYLE):
        for name, row in zip(ROWS, rows, strict=True):
            figure: Any = Figure(figsize=(15, 4.3), layout="constrained")
            for axes, panel in zip(figure.subplots(1, len(row)), row, strict=True):
                _draw(axes, panel, list(_series(server, panel, begin, end, interval)), begin, end, marks)
            figure.savefig(directory / f"{name}.png", dpi=100)


def _series(server: Prometheus, panel: Mapping[str, Any], begin: float, end: float, interval: str) -> Iterator[Series]:
    for target in panel["targets"]:
        for found in server.query_range(expression(target["expr"], interval), begin, end):
            legend = target["legendFormat"]
            for name, value in found["metric"].items():
                legend = legend.replace(f"{{{{{name}}}}}", value)
            values = {float(at): float(value) for at, value in found["values"]}
            times = [begin + second for second in range(int(end - begin) + 1)]
            yield legend, times, [values.get(at, math.nan) for at in times]


def _draw(
    axes: Any, panel: Mapping[str, Any], series: Sequence[Series], begin: float, end: float, marks: Sequence[Mark]
) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    axes.set_title(panel["title"])
    axes.set_xlim(0, end - begin)
    axes.set_xlabel("seconds")
    unit = defaults["unit"]
    axes.set_ylabel(unit.removeprefix(_SUFFIX).strip() if unit.startswith(_SUFFIX) else _UNITS[unit])
    if defaults["unit"] == "percentunit":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif panel["title"] == "Engines ready":
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    for (name, times, values), color in zip(series, _COLORS, strict=False):
        axes.plot([at - begin for at in times], values, label=name, color=color)
    for mark in marks:
        axes.axvline(mark.at - begin, color="#6B6B6B", linestyle=":", linewidth=1)
        axes.text(mark.at - begin, 1.0, f" {mark.text}", transform=axes.get_xaxis_transform(), va="top", fontsize=8)
    highest = max((value for _, _, values in series for value in values if math.isfinite(value)), default=0.0)
    axes.set_ylim(0, 1.2 * highest or 1.0)
    if series:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, frameon=False)
    else:
        axes.text(0.5, 0.5, panel["description"], transform=axes.transAxes, ha="center", wrap=True)


def _load(server: ServerProcess) -> list[Mark]:
    """Load the server with more and more clients, and end its engine during the last load."""
    marks = []
    for clients in _CLIENTS:
        marks.append(Mark(time.time(), f"{clients} clients"))
        command = [sys.executable, "-m", "handler", "bench", server.url, "--clients", str(clients)]
        command += ["--seconds", str(_SECONDS), "--repeat", "1", "--quiet", "99", "--tokens", "32", "--no-plot"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL):
            if clients == _CLIENTS[-1]:
                time.sleep(_SECONDS - _ENGINE_ENDS)
                marks.append(Mark(time.time(), "engine killed"))
                kill(server.engine_pid(), signal.SIGKILL)
    return marks


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, serve(*options(*_OPTIONS)) as server:
        server.wait_ready(120)
        with prometheus(configuration(f"127.0.0.1:{server.port}", "1s", Path(scratch)), Path(scratch)) as found:
            begin = time.time()
            marks = _load(server)
            server.wait_ready(120)
            time.sleep(5)
            save(found, begin, time.time(), marks, PICTURES, "12s")
            alerts = sorted({series["metric"]["alertname"] for series in found.query("max_over_time(ALERTS[5m])")})
            print(f"alerts that were pending or firing: {', '.join(alerts) or 'none'}")


if __name__ == "__main__":
    main()
