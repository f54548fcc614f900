"""Compare our server on a CPU with llama.cpp's server and vLLM's, in turns: tokens a second, times to the first token.

All get OpenAI's completions, streamed, greedy, of equal length. Each server has as many threads as this process may use
cores: `taskset -c 0` compares CPU time where other work disturbs. It prints two tables, then one line of JSON. Run it
with nothing else on the machine:

    python bench/cpu_peers.py --llama PATH/llama-server [--vllm PATH/vllm --vllm-model DIRECTORY] [--model FILE.gguf]

llama-server: built from the sources in the sdist of llama-cpp-python, with GGML_NATIVE. vllm: the command of an
environment that has a build of vLLM for CPUs. The exit status is 1 if a request failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from engines import count, counts
from peer import free_port, started
from systems import turns
from systems.apis import MODEL, Completions
from systems.base import Sample, Start, System
from systems.served import Served
from systems.turns import Point

from handler.config import model_files
from handler.core.errors import ConfigError
from proof.bench import machine
from proof.bench.load import percentiles
from proof.bench.processes import lmi_serve
from proof.bench.report import errors, first_token_times, table

OURS, LLAMA, VLLM = "lmi serve", "llama.cpp", "vllm serve"

_LOADING = 600.0  # seconds
_MARGIN = 64  # tokens of context beside a prompt's and an answer's
_TOKENS_A_WORD = 3  # at most, of the load's prompts


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--model", default=model_files.DEMO, help="a GGUF file (default: the demo model)")
    add(
        "-o", dest="options", action="append", default=[], metavar="KEY=VALUE", help="for ours, as `lmi serve` takes it"
    )
    add("--llama", type=Path, metavar="FILE", help="llama.cpp's llama-server")
    add("--vllm", type=Path, metavar="FILE", help="the command vllm")
    add(
        "--vllm-model", metavar="DIRECTORY", help="what vLLM serves instead: the same model as a Hugging Face directory"
    )
    add("--clients", type=counts, default=[1, 2, 4, 8, 16, 32], help="(default 1,2,4,8,16,32)")
    add("--rounds", type=count, default=4, help="answers of each client in a measurement (default %(default)s)")
    add("--tokens", type=count, default=128, help="of every answer (default %(default)s)")
    add("--prompt-words", type=count, default=48, help="(default %(default)s)")
    add("--repeat", type=count, default=3, help="medians are of so many (default %(default)s)")
    add("--apart", action="store_true", help="one server up at a time: slower, in less memory")
    add("--quiet", type=float, default=0.2, help="cores of other processes that are borne (default %(default)s)")
    return result


def starts(given: argparse.Namespace) -> dict[str, Start]:
    """Names of the servers -> how each is started."""
    places = max(given.clients)
    context = given.tokens + _TOKENS_A_WORD * given.prompt_words + _MARGIN
    found: dict[str, Start] = {OURS: lambda: _ours(given.model, given.options)}
    if given.llama:
        llama = [str(given.llama), "--model", str(model_files.locate(given.model).path), "--alias", MODEL]
        llama += [
            "--threads",
            str(len(os.sched_getaffinity(0))),
            "--parallel",
            str(places),
            "--ctx-size",
            str(places * context),
        ]
        found[LLAMA] = lambda: _peer(llama)
    if given.vllm:
        if not given.vllm_model:
            raise ConfigError("--vllm needs --vllm-model: vLLM reads no GGUF file")
        vllm = [str(given.vllm), "serve", given.vllm_model, "--served-model-name", MODEL]
        vllm += ["--max-num-seqs", str(places), "--max-model-len", str(context), "--enforce-eager"]
        found[VLLM] = lambda: _peer(vllm)
    return found


@contextlib.contextmanager
def _ours(model: str, options: Sequence[str]) -> Iterator[System]:
    settings = (f"option.model_id={model}", *options)
    with lmi_serve([part for setting in settings for part in ("-o", setting)], timeout=_LOADING) as server:
        yield Served(server.url, server.pid, Completions, ())


@contextlib.contextmanager
def _peer(command: Sequence[str]) -> Iterator[System]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with started([*command, "--host", "127.0.0.1", "--port", str(port)], url, _LOADING) as pid:
        yield Served(url, pid, Completions, ())


def summarize(point: Point) -> dict[str, Any]:
    """Return each server's metrics at one number of clients, and ours over the others' (medians of the turns')."""
    names = list(point.turns[0])
    value: dict[str, Any] = {"clients": point.clients, "turns_disturbed": point.disturbed, "servers": {}}
    for name in names:
        samples = [turn[name] for turn in point.turns]
        results = [result for sample in samples for result in sample.results]
        value["servers"][name] = {
            "tokens_per_second": statistics.median(sample.rate for sample in samples),
            "ttft_ms": percentiles([1e3 * seconds for seconds in first_token_times(results)]),
            "cpu_ms": statistics.median(map(_cpu, samples)),
            "errors": errors(results),
        }
    value["over"] = {
        name: {
            "tokens_per_second": _ratio(point, name, lambda sample: sample.rate),
            "ttft": _ratio(point, name, _first_token),
            "cpu": _ratio(point, name, _cpu),
        }
        for name in names
        if name != OURS
    }
    return value


def _first_token(sample: Sample) -> float:
    return statistics.median(first_token_times(sample.results))


def _cpu(sample: Sample) -> float:
    """Return CPU milliseconds a token of all of a server's processes."""
    assert sample.used is not None
    return 1e3 * sum(sample.used.host.values()) / sample.tokens


def _ratio(point: Point, other: str, figure: Callable[[Sample], float]) -> float:
    return statistics.median(figure(turn[OURS]) / figure(turn[other]) for turn in point.turns)


def show(values: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            str(value["clients"]), name, f"{found['tokens_per_second']:,.1f}", f"{found['ttft_ms']['p50']:,.1f}",
            f"{found['ttft_ms']['p99']:,.1f}", f"{found['cpu_ms']:.2f}", str(sum(found["errors"].values())),
        ]
        for value in values
        for name, found in value["servers"].items()
    ]  # fmt: skip
    return table(["clients", "server", "tokens/s", "TTFT p50", "p99 ms", "CPU ms/token", "errors"], rows)


def show_ratios(values: Sequence[dict[str, Any]]) -> str:
    rows = [
        [str(value["clients"]), name, *(f"{ratio[kind]:.2f}" for kind in ("tokens_per_second", "ttft", "cpu"))]
        for value in values
        for name, ratio in value["over"].items()
    ]
    return table(["clients", "ours over", "tokens/s", "TTFT", "CPU/token"], rows)


def run(given: argparse.Namespace) -> int:
    plan = turns.Plan(
        clients=given.clients,
        rounds=given.rounds,
        tokens=given.tokens,
        prompt_words=given.prompt_words,
        processes=1,  # of the load generator: the servers need the cores
        repeat=given.repeat,
        together=not given.apart,
        quiet=given.quiet,
    )
    points, _ = turns.run(plan, starts(given))
    values = [summarize(point) for point in points]
    facts = machine.describe()
    print(machine.summary(facts))
    print(f"answers of {plan.tokens} tokens, prompts of {plan.prompt_words} words, {plan.rounds} rounds, ", end="")
    print(f"{plan.repeat} times\n\n{show(values)}\n")
    if any(value["over"] for value in values):
        print(show_ratios(values) + "\n")
    if any(value["turns_disturbed"] for value in values):
        print(f"DISTURBED: more than {plan.quiet:g} of a core went elsewhere in some turns")
    print(json.dumps({**facts, "plan": vars(plan), "options": given.options, "results": values}))
    return int(any(found["errors"] for value in values for found in value["servers"].values()))


def main() -> int:
    try:
        return run(parser().parse_args())
    except ConfigError as error:
        print(f"cpu_peers.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
