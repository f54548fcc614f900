"""`lmi deploy bench`: measure an endpoint under load."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from deploy.bench.metrics import advice, rows
from deploy.bench.requests import by_invocations, by_openai
from deploy.bench.run import Plan, measure
from deploy.cli.console import out, table
from deploy.cli.endpoint_arguments import add_endpoint_arguments, add_parameters, parameters_of, predictor_of
from deploy.client.retry import IMPATIENT
from handler.bench.report.arguments import add_arguments, print_result
from handler.bench.report.progress import progress_bar


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure an endpoint under load",
        description="Streams answers at rising load and prints time to "
        "first token, time between tokens, throughput and errors, with advice on scaling.concurrency; the last line is "
        "JSON. It costs what its requests cost. `lmi bench --compare` compares results.",
    )
    add_endpoint_arguments(parser)
    add_parameters(parser)
    loads = parser.add_mutually_exclusive_group()
    loads.add_argument(
        "--clients",
        type=_numbers(int),
        default=[1, 2, 4, 8, 16],
        metavar="N,N,...",
        help="concurrent requests, one level each (default 1,2,4,8,16)",
    )
    loads.add_argument(
        "--rate",
        type=_numbers(float),
        metavar="R,R,...",
        help="requests a second, however slow the answers are, one level each",
    )
    parser.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help="requests of each level (default: 4 a client, at least 8; with --rate 50)",
    )
    parser.add_argument("--words", type=int, default=100, help="words per prompt (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of an answer (default %(default)s)")
    parser.add_argument(
        "--route",
        choices=["invocations", "openai"],
        default="invocations",
        help="InvokeEndpointWithResponseStream, or chat completions (default %(default)s)",
    )
    add_arguments(parser, Path("lmi-deploy-bench.png"))
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    plan = Plan(tuple(arguments.clients), tuple(arguments.rate or ()), arguments.requests)
    body = (arguments.words, arguments.max_tokens, parameters_of(arguments))
    predictor = predictor_of(arguments)
    if arguments.route == "openai":
        warm = ask = by_openai(predictor, *body, plan.connections)
    else:
        warm = by_invocations(predictor, *body)
        ask = by_invocations(predictor_of(arguments, patience=IMPATIENT, connections=plan.connections), *body)
    with progress_bar(len(plan.rates or plan.clients)) as advance:

        def report(text: str) -> None:
            advance(text)
            print(text, file=sys.stderr)

        levels = measure(plan, ask, warm, report)
    values = advice(levels) if not plan.rates else None
    head, *lines = rows(levels)
    shown = table(head, lines)
    for column in shown.columns[1:]:
        column.justify = "right"
    out().print(shown)
    if values is not None:
        print(values.text)
    document = {
        "endpoint": arguments.name,
        "route": arguments.route,
        "words": arguments.words,
        "max_tokens": arguments.max_tokens,
        "levels": levels,
        "knee": values and values.knee,
        "scaling_concurrency": values and values.concurrency,
    }
    return print_result(arguments, document) or int(all(level["requests_per_second"] == 0 for level in levels))


def _numbers(kind: type[int] | type[float]) -> Any:
    def parse(text: str) -> list[float]:
        try:
            values = [kind(item) for item in text.split(",")]
        except ValueError:
            values = []
        if not values or any(not 0 < item <= 10_000 for item in values):
            raise argparse.ArgumentTypeError("must be numbers above 0, separated by commas")
        return values

    return parse
