"""`lmi deploy stream`: send one request, print the answer as it arrives."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from deploy.cli.endpoint_arguments import add_body, add_endpoint_arguments, body_of, options_of, predictor_of
from deploy.cli.views.text import printable
from deploy.client import RequestFailed


def add(commands: Any) -> None:
    parser = commands.add_parser("stream", help="send one request, print the answer's text as it arrives")
    add_endpoint_arguments(parser)
    add_body(parser)
    parser.add_argument("--raw", action="store_true", help="print the raw bytes in place of the text")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    with predictor_of(arguments).predict_stream(body_of(arguments), **options_of(arguments)) as stream:
        if arguments.raw:
            for part in stream.bytes():
                sys.stdout.buffer.write(part)
                sys.stdout.buffer.flush()
            return 0
        try:
            for piece in stream.text():
                print(printable(piece), end="", flush=True)
        except RequestFailed:
            print()
            raise
        print()
    return 0
