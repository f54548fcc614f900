"""The command line of `lmi deploy` and `python -m deploy`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pkgutil import resolve_name

from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from deploy.aws import as_deploy_error
from deploy.errors import DeployError
from handler.core.command_line import Parser, add_installed

COMMANDS = {
    "adopt": "deploy.cli.adopt:add",
    "plan": "deploy.cli.plan:add",
    "up": "deploy.cli.up:add",
    "status": "deploy.cli.operate:add_status",
    "logs": "deploy.cli.operate:add_logs",
    "invoke": "deploy.cli.invoke:add",
    "stream": "deploy.cli.invoke:add_stream",
    "chat": "deploy.cli.invoke:add_chat",
    "scale": "deploy.cli.operate:add_scale",
    "update": "deploy.cli.up:add_update",
    "promote": "deploy.cli.up:add_promote",
    "down": "deploy.cli.down:add",
    "batch": "deploy.cli.batch:add",
    "export": "deploy.cli.export:add",
    "iam": "deploy.cli.iam:add",
    "doctor": "deploy.cli.doctor:add",
    "local": "deploy.cli.local:add",
    "schema": "deploy.cli.plan:add_schema",
}
"""Maps each command, in the order of the help, to the function that adds its parser and sets `run`.

The modules are imported when they are needed. All of them together take a second.
"""


_DESCRIPTION = """Deploy a model to a SageMaker endpoint, and send requests to it. Exit status, with and without \
--json: 0 done, 1 failed, 2 the specification or the arguments are wrong, or the request is refused, 3 AWS denies a \
call, 4 the endpoint or another resource does not exist, 5 AWS accepted the call but the resource failed."""


def main(argv: Sequence[str] | None = None, prog: str = "lmi deploy") -> int:
    words = sys.argv[1:] if argv is None else argv
    arguments = make_parser(prog, next(iter(words), "")).parse_all(words)
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


def make_parser(prog: str, command: str = "") -> Parser:
    """Create the parser for a built-in command, or for all commands if there is no such command."""
    parser = Parser(prog=prog, description=_DESCRIPTION)
    add_commands(parser, command)
    return parser


def add_commands(parser: argparse.ArgumentParser, command: str = "") -> None:
    """Add the parser of a built-in command, or those of all built-in and installed commands."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_AnyOrder)
    if command in COMMANDS:
        resolve_name(COMMANDS[command])(commands)
        return
    for add in COMMANDS.values():
        resolve_name(add)(commands)
    add_installed(commands, "lmi.deploy.commands")


def print_error(error: DeployError) -> int:
    print(f"lmi deploy: {error}\n{error.advice}".rstrip(), file=sys.stderr)
    return error.status
