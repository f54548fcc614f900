"""Run `make bench`: the demo model in the server and alone, then the host's CPU per token; tables, a plot, a JSON line.

MODEL names another model. `lmi bench` and `bench/host_cpu.py` have more arguments.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import host_cpu

from proof.bench import machine, plot
from proof.bench import run as measurement
from proof.bench.load import Closed
from proof.bench.plot import curve_of

TARGET = 0.95
OUT = Path(__file__).parent / "out"


def served_over_engine(model: str, repeat: int) -> dict[str, object]:
    """Compare the server with the engine alone; print the table, return its part of the JSON line."""
    plan = measurement.Plan(
        [Closed(clients, requests=4) for clients in (1, 8, 32)], tokens=128, engine="auto", model=model, repeat=repeat
    )
    points = measurement.measure_all(plan)
    report = measurement.document(plan, points)
    measurement.show(plan, points, report)
    picture = OUT / "served.png"
    OUT.mkdir(exist_ok=True)
    plot.save(picture, [curve_of(report)])
    print(f"plot: {picture}")
    met = all(value["served_over_engine"] >= TARGET and not value["errors"] for value in report["results"])
    print(f"{'met' if met else 'NOT MET'}: served / engine >= {TARGET}\n")
    return {"plan": report["plan"], "results": report["results"], "target": TARGET, "met": met}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("MODEL", "demo"), help="(default: $MODEL, else demo)")
    parser.add_argument("--repeat", type=int, default=3, help="medians are of so many (default %(default)s)")
    parser.add_argument("--only", choices=("served", "host"), help="one of the two parts")
    arguments = parser.parse_args()
    report = machine.describe()
    print(machine.summary(report))
    parts = {}
    if arguments.only != "host":
        parts["served_over_engine"] = served_over_engine(arguments.model, arguments.repeat)
    if arguments.only != "served":
        parts["host_cpu"] = host_cpu.run((32, 256, 1024), seconds=8.0, repeat=arguments.repeat, processes=2)
    print(json.dumps({**parts, **report}))
    return 0 if all(part["met"] for part in parts.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
