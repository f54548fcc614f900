"""Throughput of replicas against one engine, in turns: python bench/replicas.py [--engine openvino --model demo].

By default echo paced at 20 tokens a second with 16 places: one engine can do 320 tokens a second, two 640.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time

from handler.bench.client import Connections, Target
from handler.bench.load import closed_loop
from handler.bench.server import lmi_serve

_TOKENS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="echo", choices=("echo", "openvino"))
    parser.add_argument("--model", nargs="*", default=[], help="the model of openvino, as `lmi serve` takes it")
    parser.add_argument("--replicas", default="1,2", help="numbers to compare, the first being the base")
    parser.add_argument("--clients", default="32,128")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--places", type=int, default=16)
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.replicas.split(",")]
    for clients in (int(number) for number in arguments.clients.split(",")):
        found: dict[int, list[float]] = {count: [] for count in counts}
        for turn in range(arguments.repeat):
            for count in counts if turn % 2 == 0 else reversed(counts):
                found[count].append(measure(arguments, count, clients))
        base = statistics.median(found[counts[0]])
        for count, rates in found.items():
            rate = statistics.median(rates)
            shown = ", ".join(f"{one:.0f}" for one in rates)
            print(
                f"{clients} clients, {count} replicas: {rate:.0f} tokens/s, {rate / base:.2f} of {counts[0]} ({shown})"
            )


def measure(arguments: argparse.Namespace, count: int, clients: int) -> float:
    """Return the tokens a second of a fresh server in the middle of the load, when all clients are there."""
    options = [f"replicas={count}", f"max_rolling_batch_size={arguments.places}", "engine_isolation=process"]
    options += ["echo_tokens_per_second=20"] if arguments.engine == "echo" else []
    words = [word for option in options for word in ("-o", f"option.{option}")]
    with lmi_serve([*arguments.model, "--engine", arguments.engine, *words]) as server:
        return asyncio.run(_load(server.url, clients, arguments.seconds))


async def _load(url: str, clients: int, seconds: float) -> float:
    connections = Connections(Target(url, tokens=_TOKENS))
    end = time.monotonic() + seconds
    begin, until = end - seconds * 0.75, end - seconds * 0.05
    numbers = itertools.count()

    def requests() -> itertools.takewhile[int]:
        return itertools.takewhile(lambda number: time.monotonic() < end, numbers)

    results = await closed_loop(connections.ask, [requests() for _ in range(clients)])
    connections.close()
    if failed := [result.error for result in results if result.error]:
        raise ConnectionError(f"{len(failed)} requests failed: {failed[0]}")
    arrivals = [at for result in results for at in result.arrivals if begin <= at < until]
    return len(arrivals) / (until - begin)


if __name__ == "__main__":
    main()
