"""`lmi deploy scale NAME N`, or `--min`, `--max`: set the number of instances or copies."""

from __future__ import annotations

import argparse
from typing import Any

from deploy.aws import Aws
from deploy.cli.arguments import add_endpoint
from deploy.cli.console import out
from deploy.cli.views.progress import live_progress
from deploy.deployer.wait import wait_for
from deploy.errors import Refused
from deploy.operations.scale import scaling_target, set_bounds, set_count


def add(commands: Any) -> None:
    parser = commands.add_parser("scale", help="set the number of instances or copies")
    add_endpoint(parser)
    parser.add_argument("count", nargs="?", type=int, metavar="N", help="instances, or copies of the component")
    parser.add_argument("--component", metavar="NAME", help="which component, where there are several")
    parser.add_argument("--min", type=int, help="minimum of automatic scaling")
    parser.add_argument("--max", type=int, help="maximum of automatic scaling")
    parser.add_argument("--no-wait", action="store_true", help="return as soon as AWS has accepted it")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    bounds = arguments.min is not None or arguments.max is not None
    if arguments.count is None and not bounds:
        raise Refused("nothing to do", "Give N, or --min and --max.")
    aws = Aws(arguments.region)
    what = scaling_target(aws, arguments.name, arguments.component)
    if bounds:
        low, high = set_bounds(aws, what, arguments.min, arguments.max)
        print(f"{what.target}: scales between {low} and {high}")
        what = scaling_target(aws, arguments.name, arguments.component)
    if arguments.count is not None:
        note = set_count(aws, what, arguments.count)  # may refuse
        print(f"{what.target}: {what.count} -> {arguments.count}")
        if note:
            print(note)
        if not arguments.no_wait:
            with live_progress(out()) as report:
                wait_for(aws, what.resource, report)
    return 0
