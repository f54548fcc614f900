"""`lmi deploy logs NAME`: print the logs of an endpoint's containers and components."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from botocore.exceptions import ClientError

from deploy.aws import Aws, components_of
from deploy.cli.arguments import add_endpoint
from deploy.errors import NotThere
from deploy.operations import logs


def add(commands: Any) -> None:
    parser = commands.add_parser("logs", help="print the containers' logs")
    add_endpoint(parser)
    parser.add_argument("--component", metavar="NAME", help="of this component only")
    parser.add_argument("--follow", "-f", action="store_true", help="print new lines until Ctrl-C")
    parser.add_argument("--since", default="15m", metavar="PERIOD", help="how far back: 90s, 15m, 2h, 1d (15m)")
    parser.add_argument("--filter", metavar="TEXT", help="only lines that hold this")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    aws = Aws(arguments.region)
    since = int((time.time() - logs.period(arguments.since).total_seconds()) * 1000)
    if arguments.component is not None:
        groups = [logs.component_group(arguments.component)]
    else:
        groups = [logs.endpoint_group(arguments.name)]
        groups += [logs.component_group(name) for name in components_of(aws, arguments.name)]
    if not arguments.follow:
        lines = [line for group in groups for line in logs.lines(aws, group, since=since, pattern=arguments.filter)]
        for line in sorted(lines, key=lambda line: line.at):
            _show(line)
        if not lines:
            _refuse_none(aws, groups)
            print(f"nothing was written in the last {arguments.since}", file=sys.stderr)
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        for line in logs.follow(aws, groups, since=since, pattern=arguments.filter):
            _show(line)
    return 0


def _refuse_none(aws: Aws, groups: Sequence[str]) -> None:
    """Raise NotThere if no group exists."""
    try:
        there = any(logs.exists(aws, group) for group in groups)
    except ClientError:  # permission to read a log does not imply permission to list them
        return
    if not there:
        raise NotThere(
            f"there is no log group {' or '.join(groups)} in {aws.region}",
            "Look at the name and at --region; a container that has not started has written nothing.",
        )


def _show(line: logs.Line) -> None:
    at = datetime.fromtimestamp(line.at / 1000, timezone.utc).strftime("%H:%M:%S")
    print(f"{at} {line.stream.rpartition('/')[2][-8:]} {line.text}", flush=True)
