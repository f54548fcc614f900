"""`lmi deploy update`: as `up`, for an existing endpoint."""

from __future__ import annotations

import argparse
from typing import Any

from deploy.cli.deployment.up import add_adopt, add_arguments, deploy


def add(commands: Any) -> None:
    parser = commands.add_parser("update", help="change an existing endpoint; alarms trigger a rollback")
    add_arguments(parser)
    add_adopt(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    return deploy(arguments, "update")
