"""`lmi deploy chat`: talk to a model, on a terminal or from a pipe."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from deploy.cli.endpoint_arguments import add_endpoint_arguments, add_parameters, parameters_of, predictor_of
from deploy.cli.views.text import printable
from deploy.client import RequestFailed
from deploy.client.conversation import Conversation

_HELP = (
    "/reset forgets the conversation, /system TEXT tells the model what it is, /quit ends. "
    "Ctrl-C ends an answer, or drops the line."
)


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to the model",
        description=f"One line is what you say. {_HELP} From a pipe, each line is "
        "said after the answer to the one before.",
    )
    add_endpoint_arguments(parser)
    add_parameters(parser)
    parser.add_argument("--system", default="", metavar="TEXT", help="what the model is told before all else")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    conversation = Conversation(predictor_of(arguments), arguments.system, parameters_of(arguments))
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() then has a history, and keys that move in the line
        print(_HELP, file=sys.stderr)
    while (line := _line(terminal)) is not None:
        if line.startswith("/"):
            if not _command(conversation, line):
                return 0
        elif line:
            _answer(conversation, line, terminal)
    return 0


def _line(terminal: bool) -> str | None:
    try:
        return input("> " if terminal else "").strip()
    except EOFError:
        if terminal:
            print()
        return None
    except KeyboardInterrupt:
        if not terminal:
            raise
        print()
        return ""


def _command(conversation: Conversation, line: str) -> bool:
    """Run a command; return False to end the conversation."""
    name, _, text = line.partition(" ")
    if name == "/quit":
        return False
    if name == "/reset":
        conversation.reset()
    elif name == "/system":
        conversation.system = text.strip()
    else:
        print(f"{name}: there is no such command. {_HELP}", file=sys.stderr)
    return True


def _answer(conversation: Conversation, line: str, terminal: bool) -> None:
    """Print the answer. Raises RequestFailed if there is no terminal to ask again on."""
    answer = conversation.ask(line)
    try:
        for piece in answer:
            print(printable(piece), end="", flush=True)
    except KeyboardInterrupt:
        print(" ...", end="")
    except RequestFailed as error:
        if not terminal:
            raise
        print(printable(f"{error}\n{error.advice}".strip(), sys.stderr), file=sys.stderr)
    finally:
        answer.close()  # type: ignore[attr-defined]
        print(flush=True)
