"""The command line of `lmi deploy` and `python -m deploy`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from deploy.aws import as_deploy_error
from deploy.errors import DeployError
from handler.core.command_line import Parser

COMMANDS = {
    "adopt": "deployment",
    "plan": "deployment",
    "up": "deployment",
    "status": "endpoint",
    "logs": "endpoint",
    "invoke": "endpoint",
    "stream": "endpoint",
    "chat": "endpoint",
    "bench": "endpoint",
    "scale": "endpoint",
    "update": "deployment",
    "promote": "deployment",
    "down": "deployment",
    "batch": "deployment",
    "export": "deployment",
    "iam": "deployment",
    "doctor": "deployment",
    "local": "endpoint",
    "schema": "deployment",
}
"""Commands in the help's order, and the package below `deploy.cli` that holds each one's module.

A module has `add(commands)`, which adds the command's parser and sets `run`.
"""


def main(argv: Sequence[str] | None = None, prog: str = "lmi deploy") -> int:
    arguments = _parser(prog).parse_all(sys.argv[1:] if argv is None else argv)
    try:
        return int(arguments.run(arguments))
    except (BotoCoreError, ClientError, ResponseParserError) as error:
        return _print_error(as_deploy_error(error))
    except DeployError as error:
        return _print_error(error)
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        return 130


class _AnyOrder(Parser):
    """Accept flags between positional arguments: Python before 3.13 refuses the BODY of `NAME --flag BODY`."""

    _within = False

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        if self._within:
            return super().parse_known_args(args, namespace)
        self._within = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._within = False


def _parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description="Deploy a model to a SageMaker endpoint, and call it.")
    add_commands(parser)
    return parser


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the parsers of all commands."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_AnyOrder)
    for name, package in COMMANDS.items():
        importlib.import_module(f"deploy.cli.{package}.{name}").add(commands)


def _print_error(error: DeployError) -> int:
    print(f"lmi deploy: {error}", file=sys.stderr)
    if error.advice:
        print(error.advice, file=sys.stderr)
    return error.status
