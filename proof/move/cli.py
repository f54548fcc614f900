"""Command line of `lmi move`. Its steps are imported only when it runs, so that `lmi serve` starts quickly."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from handler.core.command_line import KeptLines, add_json, add_repeatable
from handler.core.errors import ConfigError
from handler.core.package import install

_DESCRIPTION = """Move an endpoint to this project, as far as this machine can prove it: adopt the endpoint, check the \
specification, start its options here with another model, replay REQUESTS, and test the contract of the old container. \
At the end, print what is proven and, by name, what is not. Nothing is changed in AWS.

REQUESTS without recorded responses are only checked against the contract, and are compared with nothing. With \
recorded responses they are compared with these. --against endpoint sends them to the live endpoint.

Exit status, with and without --json:
  0   every step passed, and every request has a response of the right form or an equal one
  1   an error that is none of these
  2   the arguments are wrong, a file cannot be read, or the endpoint cannot be adopted
  3   AWS denies a call
  4   the endpoint does not exist
  5   AWS accepted a call, but a resource failed
  6   check: the specification or the options here have problems
  7   start: the server does not start here
  8   replay: a response differs from the reference, or breaks the contract
  9   conform: a rule of the contract fails
  10  nothing failed, but no request was compared or checked
  130 interrupted"""
_EXAMPLE = """examples:
  lmi move model.json requests.jsonl --role arn:aws:iam::123456789012:role/endpoint
  lmi move chat requests.jsonl --against endpoint --model OWNER/MODEL
"""

ADOPT = {
    "name": ("NAME", "the deployment's name (default: the endpoint's, or the file's)"),
    "region": ("REGION", "AWS region (default: boto3's setting)"),
    "role": ("ARN", "execution role (default: the endpoint's)"),
    "image": ("IMAGE", "image URI, or repository in this account (default: as for lmi deploy adopt)"),
    "container": ("KIND", "server in the endpoint's image, if the image's name does not show it"),
    "variant": ("VARIANT", "production variant, if there are several; requires --name"),
    "token-secret": ("ARN", "ARN of the secret with the Hugging Face token"),
}
"""Flags that `lmi deploy adopt` has too, with their metavariables and descriptions."""


def add_parser(commands: Any) -> None:
    """Add the subcommand `move` to `lmi`."""
    parser = commands.add_parser(
        "move",
        help="adopt an endpoint, start its options here, and prove what can be proven here",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=KeptLines,
    )
    parser.add_argument(
        "endpoint", metavar="ENDPOINT", help="a JSON file that lmi deploy adopt --file reads, or an endpoint's name"
    )
    parser.add_argument("requests", nargs="?", metavar="REQUESTS", help="requests as for lmi replay, or bodies alone")
    parser.add_argument(
        "--against",
        choices=("contract", "recorded", "endpoint"),
        help="the reference (default: recorded if the first requests have a response, or else contract)",
    )
    local = parser.add_argument_group("the server here")
    local.add_argument("--model", default="demo", help="the model that is served here (default: %(default)s)")
    local.add_argument("--engine", help="the engine here (default: as for lmi serve)")
    add_repeatable(local, "-o", "options", "KEY=VALUE", "an option that replaces one of the specification, only here")
    add_repeatable(local, "--rule", "rule", "RULE", "test only this rule or group of lmi conform")
    adopt = parser.add_argument_group("lmi deploy adopt")
    for flag, (metavar, meaning) in ADOPT.items():
        adopt.add_argument(f"--{flag}", metavar=metavar, help=meaning)
    adopt.add_argument("--recommendation", type=int, metavar="N", help="number of the job's recommendation")
    adopt.add_argument("--read-data", action="store_true", help="for a file: also read options from model data in S3")
    report = parser.add_argument_group("report")
    report.add_argument(
        "--output",
        type=Path,
        default=Path("lmi-move"),
        metavar="DIRECTORY",
        help="directory for the specification and the reports (default: %(default)s)",
    )
    report.add_argument("--restart", action="store_true", help="replace the specification of an earlier run")
    add_json(report)
    parser.set_defaults(run=_move)


def _move(arguments: argparse.Namespace) -> int:
    try:
        from proof.move.run import run
    except ModuleNotFoundError as error:
        raise ConfigError(f"lmi move: {error.name} is not installed: {install('lmi-handler[deploy]')}") from None
    return run(arguments)
