"""`lmi deploy status`, `logs`, `scale`: operate a running endpoint."""

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
from deploy.cli.arguments import add_endpoint, add_flags
from deploy.cli.views import live_progress, out, status_as_json, view
from deploy.deployer.wait import wait_for
from deploy.errors import NotThere, Refused
from deploy.operations import logs
from deploy.operations.scale import refuse_foreign, scaling_target, set_bounds, set_count
from deploy.operations.status import look
from handler.core.command_line import print_json

_NOT_SERVING = 5


def add_status(commands: Any) -> None:
    parser = commands.add_parser("status", help="print an endpoint's status")
    add_endpoint(parser)
    add_flags(parser, "json")
    parser.set_defaults(run=_status)


def _status(arguments: argparse.Namespace) -> int:
    status = look(Aws(arguments.region), arguments.name)
    if arguments.json:
        print_json(status_as_json(status))
    else:
        out().print(view(status))
    return 0 if status.serving else _NOT_SERVING


# -- `lmi deploy logs NAME`: print the logs of an endpoint's containers and components ---------------------------------


def add_logs(commands: Any) -> None:
    parser = commands.add_parser("logs", help="print the containers' logs")
    add_endpoint(parser)
    parser.add_argument("--component", metavar="NAME", help="show only the logs of this component")
    parser.add_argument("--follow", "-f", action="store_true", help="print new lines until Ctrl-C")
    parser.add_argument(
        "--since", default="15m", metavar="PERIOD", help="age of the oldest line: 90s, 15m, 2h, 1d (default: 15m)"
    )
    parser.add_argument("--filter", metavar="TEXT", help="show only lines that contain this text")
    parser.set_defaults(run=_logs)


def _logs(arguments: argparse.Namespace) -> int:
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
            show_line(line)
        if not lines:
            _refuse_none(aws, groups)
            print(f"no lines were logged in the last {arguments.since}", file=sys.stderr)
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        for line in logs.follow(aws, groups, since=since, pattern=arguments.filter):
            show_line(line)
    return 0


def _refuse_none(aws: Aws, groups: Sequence[str]) -> None:
    """Raise NotThere if none of the log groups exists."""
    try:
        there = any(logs.exists(aws, group) for group in groups)
    except ClientError:  # permission to read a log group does not imply permission to list log groups
        return
    if not there:
        raise NotThere(
            f"there is no log group {' or '.join(groups)} in {aws.region}",
            "Check the name and --region. A container that has not started has no logs yet.",
        )


def show_line(line: logs.LogLine) -> None:
    at = datetime.fromtimestamp(line.at / 1000, timezone.utc).strftime("%H:%M:%S")
    print(f"{at} {line.stream.rpartition('/')[2][-8:]} {line.text}", flush=True)


# -- `lmi deploy scale NAME N`, or `--min`, `--max`: set the number of instances or copies -----------------------------


def add_scale(commands: Any) -> None:
    parser = commands.add_parser("scale", help="set the number of instances or copies")
    add_endpoint(parser)
    parser.add_argument("count", nargs="?", type=int, metavar="N", help="number of instances, or of copies")
    parser.add_argument("--component", metavar="NAME", help="component to scale, if there are several")
    parser.add_argument("--min", type=int, help="minimum for automatic scaling")
    parser.add_argument("--max", type=int, help="maximum for automatic scaling")
    add_flags(parser, no_wait="return as soon as AWS has accepted the change")
    parser.set_defaults(run=_scale)


def _scale(arguments: argparse.Namespace) -> int:
    bounds = arguments.min is not None or arguments.max is not None
    if arguments.count is None and not bounds:
        raise Refused("a count or a limit is required", "Pass a number of instances or copies, or --min and --max.")
    aws = Aws(arguments.region)
    target = scaling_target(aws, arguments.name, arguments.component)
    refuse_foreign(aws, target)
    if bounds:
        low, high = set_bounds(aws, target, arguments.min, arguments.max)
        print(f"{target.resource_id}: scales between {low} and {high}")
        target = scaling_target(aws, arguments.name, arguments.component)
    if arguments.count is not None:
        note = set_count(aws, target, arguments.count)  # may refuse
        print(f"{target.resource_id}: {target.count} -> {arguments.count}")
        if note:
            print(note)
        if not arguments.no_wait:
            with live_progress(out()) as report:
                wait_for(aws, target.resource, report)
    return 0
