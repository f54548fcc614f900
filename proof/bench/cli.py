"""Command line of `lmi bench`. It imports the load generator only when it runs, so that `lmi serve` starts quickly."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from handler.core.command_line import add_repeatable, positive
from handler.core.errors import ConfigError
from handler.core.numbers import is_digits
from proof.bench.report import add_arguments, print_result

if TYPE_CHECKING:
    from proof.bench.client import Load

_DESCRIPTION = """Measure a server that streams LMI's schema: tokens per second, time to first token (TTFT), time
between tokens (ITL) and errors. With --engine, the engine alone does the same work, alternating with the server.
It prints a table and one line of JSON. Exit status: 1 if a request failed or a file could not be written."""


def add_parser(commands: Any) -> None:
    """Add the subcommand `bench` to `lmi`."""
    parser = commands.add_parser(
        "bench", help="measure a server, or compare it with its engine", description=_DESCRIPTION
    )
    parser.add_argument(
        "url",
        nargs="?",
        help="a running server, such as http://host:port (default: the server that --engine starts); if it "
        "requires a key, set LMI_API_KEY in the environment",
    )
    parser.add_argument(
        "--engine",
        nargs="?",
        const="auto",
        metavar="NAME",
        help="compare with this engine alone, and serve it if no URL is given",
    )
    parser.add_argument("--model", help="model for --engine: a .gguf file, a model directory, or demo (default: demo)")
    option = "an option for --engine and its server, as for `lmi serve`"
    add_repeatable(parser, "-o", "options", "KEY=VALUE", option)
    load = parser.add_argument_group("load")
    arrivals = load.add_mutually_exclusive_group()
    arrivals.add_argument(
        "--clients",
        type=counts,
        default=[1, 8, 32],
        metavar="N,N,...",
        help="closed loop: numbers of concurrent clients (default: 1,8,32)",
    )
    load.add_argument(
        "--requests", type=count, default=4, metavar="N", help="closed loop: requests per client (default: %(default)s)"
    )
    load.add_argument("--seconds", type=positive, metavar="S", help="run for S seconds (default: 10 in open loop)")
    arrivals.add_argument("--rate", type=_rates, metavar="R,R,...", help="use an open loop: requests per second")
    load.add_argument("--constant", action="store_true", help="open loop: even intervals instead of random times")
    load.add_argument(
        "--tokens", type=count, default=128, metavar="N", help="tokens in each response (default: %(default)s)"
    )
    load.add_argument(
        "--prompt-words", type=count, default=48, metavar="N", help="words in each prompt (default: %(default)s)"
    )
    load.add_argument(
        "--timeout",
        type=positive,
        default=120.0,
        metavar="S",
        help="seconds after which a request counts as failed (default: %(default)s)",
    )
    load.add_argument(
        "--processes", type=count, default=2, metavar="N", help="processes of the load generator (default: %(default)s)"
    )
    load.add_argument(
        "--repeat", type=count, default=3, metavar="N", help="repetitions of each load (default: %(default)s)"
    )
    load.add_argument(
        "--quiet",
        type=float,
        default=0.2,
        metavar="CORES",
        help="repeat a measurement if other processes kept more CPU cores busy than this (default: %(default)s)",
    )
    add_arguments(parser)
    parser.add_argument(
        "--compare",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="compare results of this command or of `lmi deploy bench` with the first file; each was written by "
        "--output or contains printed output",
    )
    parser.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    if arguments.compare:
        return _compare(arguments)
    from handler.engines import entry
    from proof.bench.run import BenchPlan, run

    if not arguments.url and not arguments.engine:
        raise ConfigError("lmi bench: specify the URL of a running server, or --engine to start one")
    if arguments.url and not arguments.engine and (arguments.model or arguments.options):
        raise ConfigError("lmi bench: a running server has its own model and options; omit --model and -o")
    if arguments.constant and not arguments.rate:
        raise ConfigError("lmi bench: --constant requires an open loop; add --rate, or omit --constant")
    if arguments.engine and arguments.rate:
        raise ConfigError("lmi bench: --engine does not support an open loop; omit --engine or --rate")
    if arguments.engine not in (None, "auto"):
        entry(arguments.engine)
    plan = BenchPlan(
        url=arguments.url,
        engine=arguments.engine,
        model=arguments.model,
        options=arguments.options,
        loads=_loads(arguments),
        tokens=arguments.tokens,
        prompt_words=arguments.prompt_words,
        timeout=arguments.timeout,
        processes=arguments.processes,
        repeat=arguments.repeat,
        quiet=arguments.quiet,
    )
    return run(plan, lambda report: print_result(arguments.output, report))


def _compare(arguments: argparse.Namespace) -> int:
    from proof.bench.curves import read_curves
    from proof.bench.report import compare

    if arguments.url or arguments.engine or arguments.output:
        raise ConfigError("lmi bench: --compare only reads results; omit the URL, --engine and --output")
    print(compare(read_curves(arguments.compare)))
    return 0


def _loads(arguments: argparse.Namespace) -> list[Load]:
    from proof.bench.client import Closed, Open

    if arguments.rate:
        seconds = arguments.seconds or 10.0
        return [Open(rate, seconds, poisson=not arguments.constant) for rate in arguments.rate]
    return [Closed(clients, arguments.requests, arguments.seconds) for clients in arguments.clients]


def count(text: str) -> int:
    if not is_digits(text) or int(text) < 1:
        raise argparse.ArgumentTypeError("must be a whole number of at least 1")
    return int(text)


def counts(text: str) -> list[int]:
    try:
        return [count(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError("must be whole numbers of at least 1, such as 1,8,32") from None


def _rates(text: str) -> list[float]:
    return [positive(part) for part in text.split(",")]
