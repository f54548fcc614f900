"""`lmi deploy invoke`: send one request, print the whole answer."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from deploy.cli.endpoint_arguments import add_body, add_endpoint_arguments, body_of, options_of, predictor_of
from deploy.cli.views.text import printable


def add(commands: Any) -> None:
    parser = commands.add_parser("invoke", help="send one request, print the answer")
    add_endpoint_arguments(parser)
    add_body(parser)
    parser.add_argument(
        "--async",
        dest="asynchronous",
        action="store_true",
        help="through asynchronous inference: wait for the answer in S3",
    )
    parser.add_argument("--upload", metavar="S3URI", help="with --async: put a body of more than 128,000 bytes there")
    parser.add_argument(
        "--routing-target", metavar="NAME", help="the name is that of an inference router, and this its routing target"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    predictor = predictor_of(arguments, routing_target=arguments.routing_target)
    body, options = body_of(arguments), options_of(arguments)
    if arguments.asynchronous:
        accepted = predictor.predict_async(body, upload=arguments.upload, **options)
        print(f"the answer will be {accepted.output}", file=sys.stderr)
        answer = accepted.wait()
    else:
        answer = predictor.predict(body, **options)
    print(printable(answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, indent=2)))
    return 0
