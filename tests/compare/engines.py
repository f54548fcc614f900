"""Compare our server with other servers of the same model, in turns.

It measures tokens per second, time to first token (TTFT), time between tokens (ITL), and the CPU time per token of the
engine's processes and of all others (the host). The first response after startup has a separate row. All servers get
the same requests for OpenAI's completions, streamed, greedy and of equal length. The output is tables and one line of
JSON. Run nothing else on the machine. `lmi bench --engine` compares our server with the engine alone instead:

    python -m tests.compare.engines [-o KEY=VALUE ...] [--peer NAME='COMMAND ... --port {port}' ...]

-o is an option as for `lmi serve`; run it with the Python in which the engine is installed. COMMAND starts a server
that listens on loopback at {port}, responds at /health when it is ready, and names its model `model`, such as `vllm
serve DIRECTORY --served-model-name model` or `llama-server --model FILE --alias model`. To compare two versions of an
engine, such as OpenVINO GenAI, install the other version in an environment of its own, and name it as a peer:
`--peer next='ENVIRONMENT/bin/lmi serve MODEL --port {port}'`. The exit status is 1 if a request failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from handler.core.command_line import add_repeatable
from handler.core.errors import ConfigError
from proof.bench import machine, report
from proof.bench.cli import count, counts
from proof.bench.client import Closed, ResponseReader, Result, Target, percentiles
from proof.bench.processes import Server, lmi_serve, measure, option_arguments
from tests.compare.processes import Cpu, cpu_seconds, free_port, started

OURS = "lmi serve"
FIRST = "first response"
"""Label of the row for the first response after startup, in place of the number of clients. It is measured once."""
CORE = (b"VLLM::EngineCore", b"VLLM::Worker")
"""Prefixes of the names of all engines' own processes. OpenVINO and llama.cpp have no separate processes."""

_LOADING = 900.0  # seconds until a server must be ready
_TIMEOUT = 300.0  # seconds until a request counts as failed
_PROMPTS_EACH = 1 << 14  # prompt numbers reserved for each turn


class UsageReader(ResponseReader):
    """A reader that takes the number of tokens from `usage` in the response's last event.

    vLLM joins several tokens in one event if its sender is slow. Such tokens count as 0 s apart, because a client
    receives them together.
    """

    def verdict(self, expected_tokens: int) -> str:
        tokens = self._num_tokens()
        if tokens is not None:
            self.arrivals.pop()  # the event with `usage` contains no token
            del self.arrivals[tokens:]  # llama.cpp sends the finish reason in a separate event
            self.arrivals.extend(self.arrivals[-1:] * (tokens - len(self.arrivals)))
        return super().verdict(expected_tokens)

    def _num_tokens(self) -> int | None:
        try:
            return int(json.loads(self.lines.last)["usage"]["completion_tokens"])
        except (ValueError, KeyError, TypeError):  # the request failed, which `verdict` will report
            return None


class Completions(Target):
    """A server that is measured with requests for OpenAI's completions."""

    path: ClassVar[str] = "/v1/completions"
    reader: ClassVar[type[ResponseReader]] = UsageReader

    def body(self, prompt: str, tokens: int) -> dict[str, Any]:
        fixed = {"model": "model", "temperature": 0, "ignore_eos": True}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return {**fixed, **streamed, "prompt": prompt, "max_tokens": tokens}


class Sample(NamedTuple):
    """One measurement of a server. `others` is the number of CPU cores that other processes kept busy."""

    results: Sequence[Result]
    cpu: Cpu
    others: float

    @property
    def rate(self) -> float:
        """Return the tokens per second."""
        return report.tokens_per_second(self.results)

    @property
    def first_token(self) -> float:
        return statistics.median(report.first_token_times(self.results))

    @property
    def host(self) -> float:
        """Return the CPU seconds per token of the server's processes, without the engine's own processes."""
        return self.cpu.host / sum(result.num_tokens for result in self.results)

    @property
    def engine(self) -> float:
        """Return the CPU seconds per token of the engine's own processes."""
        return self.cpu.engine / sum(result.num_tokens for result in self.results)


Turn = Mapping[str, Sample]
"""One measurement of each server, by the server's name."""

_RATIOS: dict[str, Callable[[Sample], float]] = {
    "tokens_per_second": lambda sample: sample.rate,
    "ttft": lambda sample: sample.first_token,
    "host_cpu": lambda sample: sample.host,
}


def sample(args: argparse.Namespace, server: Server, turn: int, load: Closed) -> Sample:
    """Measure a server once. The index of the turn determines the prompts."""
    target = Completions(server.url, args.tokens, args.prompt_words, _TIMEOUT, turn * _PROMPTS_EACH)
    before, others = [Cpu(0.0, 0.0)], machine.OthersMeter()
    results = measure(target, load, args.processes, began=lambda: before.append(cpu_seconds(server.pid, CORE)))
    return Sample(results, cpu_seconds(server.pid, CORE).since(before[-1]), others.cores() or 0.0)


def sample_each(args: argparse.Namespace, servers: Mapping[str, Server], turn: int, load: Closed) -> Turn:
    return {name: sample(args, server, turn, load) for name, server in servers.items()}


def turns(args: argparse.Namespace, clients: int, servers: Mapping[str, Server]) -> tuple[list[Turn], int]:
    """Measure all servers several times. Each repetition starts with a different server.

    Returns:
        The turns, and how many of them were disturbed by other processes.
    """
    load = Closed(clients, args.rounds)

    def turn(number: int) -> Turn:
        first = number % len(servers)
        samples = {}
        for name in [*servers][first:] + [*servers][:first]:
            samples[name] = sample(args, servers[name], number, load)
            print(f"{clients:4} clients, {name}: {samples[name].rate:,.1f} tokens/s", file=sys.stderr, flush=True)
        return {name: samples[name] for name in servers}

    # A warm-up, so that work at the first requests of this number is not measured.
    sample_each(args, servers, 2 * args.repeat, Closed(clients, 1))
    return machine.undisturbed(args.repeat, args.quiet, turn, lambda turn: max(own.others for own in turn.values()))


def summarize(clients: int | str, turns: Sequence[Turn], disturbed: int) -> dict[str, Any]:
    """Return each server's metrics for one number of clients, and the median ratios of our server to the others."""
    return {
        "clients": clients,
        "turns_disturbed": disturbed,
        "servers": {name: _metrics([turn[name] for turn in turns]) for name in turns[0]},
        "over": {name: _ratios(name, turns) for name in turns[0] if name != OURS},
    }


def _metrics(samples: Sequence[Sample]) -> dict[str, Any]:
    results = [result for sample in samples for result in sample.results]
    return {
        "tokens_per_second": statistics.median(sample.rate for sample in samples),
        "ttft_ms": percentiles([1e3 * seconds for seconds in report.first_token_times(results)]),
        "itl_ms": percentiles([1e3 * seconds for seconds in report.gaps(results)]),
        "host_cpu_us": statistics.median(1e6 * sample.host for sample in samples),
        "engine_cpu_us": statistics.median(1e6 * sample.engine for sample in samples),
        "errors": report.errors(results),
    }


def _ratios(name: str, turns: Sequence[Turn]) -> dict[str, float]:
    return {
        kind: statistics.median(figure(turn[OURS]) / figure(turn[name]) for turn in turns)
        for kind, figure in _RATIOS.items()
    }


def show(values: Sequence[dict[str, Any]]) -> str:
    head = ["clients", "server", "tokens/s", "TTFT p50", "p99 ms", "ITL p50", "p99 ms", "host CPU us/token", "engine's"]
    rows = []
    for value in values:
        for name, data in value["servers"].items():
            figures = [data["ttft_ms"]["p50"], data["ttft_ms"]["p99"], data["itl_ms"]["p50"], data["itl_ms"]["p99"]]
            figures = [data["tokens_per_second"], *figures, data["host_cpu_us"], data["engine_cpu_us"]]
            rows.append([str(value["clients"]), name, *map(report.cell, figures), str(sum(data["errors"].values()))])
    return report.table([*head, "errors"], rows)


def show_ratios(values: Sequence[dict[str, Any]]) -> str:
    rows = [
        [str(value["clients"]), name, *(f"{ratio:.2f}" for ratio in ratios.values())]
        for value in values
        for name, ratios in value["over"].items()
    ]
    return report.table(["clients", "ours over", "tokens/s", "TTFT", "host CPU"], rows)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add_repeatable(result, "-o", "options", "KEY=VALUE", "an option for our server (default: the demo model)")
    add("--peer", dest="peers", action="append", type=_peer, default=[], metavar="NAME=COMMAND", help="another server")
    add("--clients", type=counts, default=[1, 8, 32], help="numbers of concurrent clients (default: 1,8,32)")
    add("--rounds", type=count, default=4, help="requests per client in a measurement (default: %(default)s)")
    add("--tokens", type=count, default=128, help="tokens in each response (default: %(default)s)")
    add("--prompt-words", type=count, default=48, help="words in each prompt (default: %(default)s)")
    add("--repeat", type=count, default=3, help="repetitions of each load (default: %(default)s)")
    add("--processes", type=count, default=1, help="processes of the load generator (default: %(default)s)")
    add("--quiet", type=float, default=0.2, help="CPU cores that other processes may keep busy (default: %(default)s)")
    return result


def _peer(text: str) -> tuple[str, str]:
    name, equals, command = text.partition("=")
    if not equals or "{port}" not in command:
        raise argparse.ArgumentTypeError("must be NAME=COMMAND, and COMMAND must contain {port}")
    return name, command


@contextlib.contextmanager
def _peer_server(command: str) -> Iterator[Server]:
    """Start another server on a free port."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = [word.replace("{port}", str(port)) for word in shlex.split(command)]
    with started(words, url, _LOADING) as pid:
        yield Server(url, pid)


def measure_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Start all servers, and return the metrics for their first responses and for each number of clients."""
    with contextlib.ExitStack() as stack:
        ours = lmi_serve(option_arguments(args.options or ["option.model_id=demo"]), timeout=_LOADING)
        servers = {OURS: stack.enter_context(ours)}
        for name, command in args.peers:
            servers[name] = stack.enter_context(_peer_server(command))
        first = sample_each(args, servers, 2 * args.repeat + 1, Closed(1, 1))
        values = [summarize(FIRST, [first], 0)]
        return values + [summarize(clients, *turns(args, clients, servers)) for clients in args.clients]


def run(args: argparse.Namespace) -> int:
    values = measure_all(args)
    facts = machine.describe()
    print(machine.summary(facts))
    print(f"responses of {args.tokens} tokens, prompts of {args.prompt_words} words, {args.rounds} rounds, ", end="")
    print(f"{args.repeat} times, {args.processes} load processes\n\n{show(values)}\n")
    if args.peers:
        print(show_ratios(values) + "\n")
    if any(value["turns_disturbed"] for value in values):
        print(f"DISTURBED: in some turns, other processes used more than {args.quiet:g} cores")
    print(json.dumps({**facts, "plan": vars(args), "results": values}))
    return int(any(data["errors"] for value in values for data in value["servers"].values()))


def main() -> int:
    try:
        return run(parser().parse_args())
    except ConfigError as error:
        print(f"engines.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
