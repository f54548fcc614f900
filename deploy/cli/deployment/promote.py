"""`lmi deploy promote`: make a shadow beside another owner's endpoint the variant that serves."""

from __future__ import annotations

import argparse
from typing import Any

from deploy.cli.deployment.up import add_arguments, deploy


def add(commands: Any) -> None:
    parser = commands.add_parser("promote", help="make the shadow of `up --shadow` the variant that serves")
    add_arguments(parser)
    parser.set_defaults(run=_run, adopt=True)


def _run(arguments: argparse.Namespace) -> int:
    return deploy(arguments, "promote")
