"""`python -m tests.tools.code_size`: the syntax nodes of each package, and the files that one request walks through."""

from __future__ import annotations

import ast
import json
import statistics
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import httpx

ROOT = Path(__file__).parents[2]
PACKAGES = ("handler", "deploy", "proof", "tests")
HANDLER = f"{ROOT / 'handler'}/"

_INFERENCE = "/invocations"
_STREAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "LMI by HTTP": (_INFERENCE, {"inputs": "a b c", "parameters": {"max_new_tokens": 4}}),
    "TGI by HTTP": ("/generate_stream", {"inputs": "a b c", "parameters": {"max_new_tokens": 4}}),
    "OpenAI by HTTP": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
    "Anthropic by HTTP": ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
}
IN_DJL = "LMI in DJL Serving"


class Package(NamedTuple):
    """Python files of a package, and the nodes of their syntax trees. Layout, comments and line breaks add none."""

    files: int
    nodes: int
    median: int
    largest: int
    largest_file: str


def measure(package: str) -> Package:
    sizes = {path: num_nodes(path.read_text()) for path in sorted((ROOT / package).rglob("*.py"))}
    largest = max(sizes, key=lambda path: sizes[path])
    median = int(statistics.median(sizes.values()))
    return Package(len(sizes), sum(sizes.values()), median, sizes[largest], str(largest.relative_to(ROOT)))


def num_nodes(source: str) -> int:
    """Return how many nodes the syntax tree of a file has."""
    return sum(1 for _ in ast.walk(ast.parse(source)))


def walks() -> dict[str, list[str]]:
    """Return the files of handler that a warm streamed request calls into, on any thread, by kind of request."""
    called = set[str]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HANDLER):
            called.add(frame.f_code.co_filename.removeprefix(HANDLER))

    def walk(request: Callable[[], object]) -> list[str]:
        request()
        rounds = []
        for _ in range(20):  # timers of the server run beside some of them
            called.clear()
            request()
            rounds.append(frozenset(called))
        return sorted(frozenset.intersection(*rounds))

    threading.setprofile(note)  # for the server's threads, which start below
    try:
        from tests.app.server import serve

        with serve("--engine", "echo") as server, httpx.Client(base_url=server.url) as client:
            found = {name: walk(partial(_ask, client, *to)) for name, to in _STREAMED.items()}
    finally:
        threading.setprofile(None)
    sys.setprofile(note)
    try:
        found[IN_DJL] = walk(_djl())
    finally:
        sys.setprofile(None)
    return found


def _ask(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """Ask on a connection that stays open: the end of an earlier one is no part of a walk."""
    if path != "/generate_stream":
        body = {**body, "stream": True}
    with client.stream("POST", path, json=body) as answer:
        answer.raise_for_status()
        answer.read()


def _djl() -> Callable[[], object]:
    """Return one streamed request to a rolling batch, step by step, as DJL Serving asks for it."""
    from tests.stepped import Bench, ask

    bench = Bench()
    return lambda: bench.finish(bench.step(ask("a b c", 4, stream=True)))


def main(arguments: Iterable[str]) -> None:
    packages = {name: measure(name) for name in PACKAGES if (ROOT / name).is_dir()}
    paths = walks()
    if "--json" in arguments:
        print(json.dumps({"packages": {name: package._asdict() for name, package in packages.items()}, "walks": paths}))
        return
    print(f"{'package':10}{'nodes':>10}{'files':>7}{'median':>8}{'largest':>9}")
    for name, package in packages.items():
        sizes = f"{package.nodes:10,}{package.files:7}{package.median:8,}{package.largest:9,}"
        print(f"{name:10}{sizes}  {package.largest_file}")
    print("\nfiles of handler that one warm streamed request calls into")
    for name, files in paths.items():
        print(f"{name:22}{len(files):4}")


if __name__ == "__main__":
    main(sys.argv[1:])
