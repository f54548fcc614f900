"""The command line of `lmi bench`. It imports the measurement only when it runs, so that `lmi serve` starts fast."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from handler.core.command_line import add_repeatable, positive
from handler.core.errors import ConfigError
from proof.bench.report import add_arguments, draw, print_result

if TYPE_CHECKING:
    from proof.bench.client import Load

_PICTURE = Path("lmi-bench.png")
_DESCRIPTION = """Measure a server that streams LMI's schema: tokens/s, times to the first token (TTFT) and between
tokens (ITL), errors. With --engine it also measures the engine alone on the same work, alternating with the server.
Prints a table, then one line of JSON. Exit status 1: a request failed. --compare only reads results."""


def add_parser(commands: Any) -> None:
    """Add `bench` to `lmi`'s subcommands."""
    parser = commands.add_parser(
        "bench", help="measure a server, or compare it with its engine", description=_DESCRIPTION
    )
    parser.add_argument(
        "url", nargs="?", help="a running server, such as http://host:port (default: one that --engine starts)"
    )
    parser.add_argument(
        "--engine",
        nargs="?",
        const="auto",
        metavar="NAME",
        help="compare with this engine alone, and serve it if no URL is given",
    )
    parser.add_argument("--model", help="what --engine loads: a .gguf file, a model directory, or demo (default: demo)")
    option = "an option for --engine and its server, as `lmi serve` takes it"
    add_repeatable(parser, "-o", "options", "KEY=VALUE", option)
    load = parser.add_argument_group("load")
    arrivals = load.add_mutually_exclusive_group()
    arrivals.add_argument(
        "--clients",
        type=counts,
        default=[1, 8, 32],
        metavar="N,N,...",
        help="closed loop: concurrent clients (default: 1,8,32)",
    )
    load.add_argument(
        "--requests",
        type=count,
        default=4,
        metavar="N",
        help="closed loop: requests per client (default: %(default)s)",
    )
    load.add_argument(
        "--seconds", type=positive, metavar="S", help="run for S seconds instead (default: 10 in open loop)"
    )
    arrivals.add_argument("--rate", type=_rates, metavar="R,R,...", help="open loop instead: requests per second")
    load.add_argument("--constant", action="store_true", help="open loop: evenly spaced, not at random times")
    load.add_argument(
        "--tokens", type=count, default=128, metavar="N", help="tokens in each answer (default: %(default)s)"
    )
    load.add_argument(
        "--prompt-words", type=count, default=48, metavar="N", help="words in each prompt (default: %(default)s)"
    )
    load.add_argument(
        "--timeout",
        type=positive,
        default=120.0,
        metavar="S",
        help="seconds until a request counts as failed (default: %(default)s)",
    )
    load.add_argument(
        "--processes",
        type=count,
        default=2,
        metavar="N",
        help="processes of the load generator (default: %(default)s)",
    )
    load.add_argument(
        "--repeat",
        type=count,
        default=3,
        metavar="N",
        help="repetitions; their medians are shown (default: %(default)s)",
    )
    load.add_argument(
        "--quiet",
        type=float,
        default=0.2,
        metavar="CORES",
        help="repeat a measurement if other processes kept more CPU cores busy than this (default: %(default)s)",
    )
    add_arguments(parser, _PICTURE)
    parser.add_argument(
        "--compare",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="compare results with the first one, of this command or of `lmi deploy bench`: files of --output, "
        "or printed output; with one file, only its plot is drawn again",
    )
    parser.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    if arguments.compare:
        return _compare(arguments)
    from handler.engines import entry
    from proof.bench.run import Plan, run

    if not arguments.url and not arguments.engine:
        raise ConfigError("lmi bench: give the URL of a running server, or --engine to start one")
    if arguments.url and not arguments.engine and (arguments.model or arguments.options):
        raise ConfigError("lmi bench: a running server has its own model and options; leave out --model and -o")
    if arguments.constant and not arguments.rate:
        raise ConfigError("lmi bench: --constant is for open loop; give --rate, or leave it out")
    if arguments.engine and arguments.rate:
        raise ConfigError("lmi bench: the engine alone has no open loop; leave out --engine or --rate")
    if arguments.engine not in (None, "auto"):
        entry(arguments.engine)
    plan = Plan(
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
    return run(plan, lambda report: print_result(arguments, report))


def _compare(arguments: argparse.Namespace) -> int:
    from proof.bench.plot import read_curves
    from proof.bench.report import compare

    if arguments.url or arguments.engine or arguments.output:
        raise ConfigError("lmi bench: --compare measures nothing; leave out the URL, --engine and --output")
    curves = read_curves(arguments.compare)
    print(compare(curves))
    return draw(arguments, curves)


def _loads(arguments: argparse.Namespace) -> list[Load]:
    from proof.bench.client import Closed, Open

    if arguments.rate:
        seconds = arguments.seconds or 10.0
        return [Open(rate, seconds, poisson=not arguments.constant) for rate in arguments.rate]
    return [Closed(clients, arguments.requests, arguments.seconds) for clients in arguments.clients]


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("must be a whole number of at least 1")
    return int(text)


def counts(text: str) -> list[int]:
    try:
        return [count(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError("must be whole numbers of at least 1, such as 1,8,32") from None


def _rates(text: str) -> list[float]:
    return [positive(part) for part in text.split(",")]
