"""Benchmark three handlers in DJL Serving's worker: ours, upstream's for TensorRT-LLM, and a minimal one.

It measures the worker's CPU time per streamed token, then tokens a second and the time to the first token through DJL's
Java side. All handlers run in turns, on every version of DJL's Python engine on Maven Central. It needs Java and Maven.

    python bench/djl_step.py [--versions 0.25.0,0.34.0] [--repeat 3] [--paces 0,200] [--only steps]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.djl, which fetches and starts DJL's Java side

from djl import first_token, served, steps

from proof.bench import machine


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--versions", type=names, default="0.25.0,0.34.0", help="of ai.djl.python (default %(default)s)")
    add("--ours", type=names, default="process,thread", help="where our engine runs, one or both (default %(default)s)")
    add("--repeat", type=int, default=3, help="medians are of so many (default %(default)s)")
    add("--tokens", type=int, default=256, help="of every answer (default %(default)s)")
    add("--sizes", type=numbers, default="1,32,128", help="requests a step (default %(default)s)")
    add("--paces", type=numbers, default="0,200", help="engine steps a second, 0: no pause (default %(default)s)")
    add("--clients", type=numbers, default="32,128", help="that stream (default %(default)s)")
    add("--seconds", type=float, default=4.0, help="of each measurement with clients (default %(default)s)")
    add("--processes", type=int, default=1, help="of the load generator (default %(default)s)")
    add("--only", choices=("steps", "served", "first_token"), help="one of the parts; first_token takes the first pace")
    given = parser.parse_args()
    report = machine.describe()
    print(machine.summary(report))
    parts = {}
    if given.only in (None, "steps"):
        parts["steps"] = steps.run(
            steps.Plan(given.ours, given.versions, given.sizes, given.tokens, given.paces, given.repeat)
        )
    through_java = served.Plan(
        given.ours, given.versions, given.clients, given.tokens, given.seconds, given.processes, given.repeat
    )
    if given.only in (None, "served"):
        parts["served"] = served.run(through_java)
    if given.only in (None, "first_token"):
        parts["first_token"] = first_token.run(through_java, given.paces[0])
    print(json.dumps({**parts, **report}))
    return 0 if all(part["met"] for part in parts.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
