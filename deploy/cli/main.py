"""The command line of `lmi deploy` and `python -m deploy`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from deploy.aws import as_deploy_error
from deploy.cli import adopt, batch, doctor, down, export, iam, invoke, local, operate, plan, up
from deploy.cli.views import for_terminal
from deploy.errors import DeployError
from handler.core.command_line import Parser, add_installed

COMMANDS: dict[str, Callable[[Any], None]] = {
    "adopt": adopt.add,
    "plan": plan.add,
    "up": up.add,
    "status": operate.add_status,
    "logs": operate.add_logs,
    "invoke": invoke.add,
    "stream": invoke.add_stream,
    "chat": invoke.add_chat,
    "scale": operate.add_scale,
    "update": up.add_update,
    "promote": up.add_promote,
    "down": down.add,
    "batch": batch.add,
    "export": export.add,
    "iam": iam.add,
    "doctor": doctor.add,
    "local": local.add,
    "schema": plan.add_schema,
}
"""Maps each command, in the order of the help, to the function that adds its parser and sets `run`."""


def main(argv: Sequence[str] | None = None, prog: str = "lmi deploy") -> int:
    arguments = make_parser(prog).parse_all(sys.argv[1:] if argv is None else argv)
    try:
        return int(arguments.run(arguments))
    except (BotoCoreError, ClientError, ResponseParserError) as error:
        return print_error(as_deploy_error(error))
    except DeployError as error:
        return print_error(error)
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        return 130


class _AnyOrder(Parser):
    """A parser that accepts flags between positional arguments (`NAME --flag BODY`), even before Python 3.13."""

    _within = False

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        if self._within:
            return super().parse_known_args(args, namespace)
        self._within = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._within = False


def make_parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description="Deploy a model to a SageMaker endpoint, and send requests to it.")
    add_commands(parser)
    return parser


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the parsers of all built-in and installed commands."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_AnyOrder)
    for add in COMMANDS.values():
        add(commands)
    add_installed(commands, "lmi.deploy.commands")


def print_error(error: DeployError) -> int:
    print(for_terminal(f"lmi deploy: {error}\n{error.advice}".rstrip(), sys.stderr), file=sys.stderr)
    return error.status
