"""`lmi deploy invoke`, `stream`, `chat`: call an endpoint."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import Any

from deploy.cli.arguments import (
    add_body,
    add_endpoint_arguments,
    add_flags,
    add_parameters,
    body_of,
    options_of,
    parameters_of,
    predictor_of,
)
from deploy.client import RequestFailed
from deploy.client.predictor import Conversation
from handler.core.terminal import unescaped

_BIDIRECTIONAL = (
    "use InvokeEndpointWithBidirectionalStream; needs Python 3.12 and the extra `bidirectional-client`. With "
    "`lmi deploy local`, --endpoint-url is the URL of --bidirectional-port"
)


def add(commands: Any) -> None:
    parser = commands.add_parser("invoke", help="send one request, and print the response")
    add_endpoint_arguments(parser)
    add_body(parser)
    parser.add_argument(
        "--async",
        dest="asynchronous",
        action="store_true",
        help="use asynchronous inference, and wait for the response in S3",
    )
    parser.add_argument(
        "--upload", metavar="S3URI", help="with --async: S3 URI to which a body above 128,000 bytes is uploaded"
    )
    parser.add_argument(
        "--routing-target",
        metavar="NAME",
        help="treat NAME as an inference router, and send the request to this routing target",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    predictor = predictor_of(arguments, routing_target=arguments.routing_target)
    body, options = body_of(arguments), options_of(arguments)
    if arguments.asynchronous:
        accepted = predictor.predict_async(body, upload=arguments.upload, **options)
        print(f"the response will be written to {accepted.output}", file=sys.stderr)
        output = accepted.wait()
    else:
        output = predictor.predict(body, **options)
    _print(f"{output if isinstance(output, str) else json.dumps(output, ensure_ascii=False, indent=2)}\n")
    return 0


def _print(text: str) -> None:
    """Print a part of a response: escaped on a terminal, and otherwise as it is, because a program reads it."""
    out = sys.stdout if sys.stdout.isatty() else unescaped(sys.stdout)
    encoding = out.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), end="", file=out, flush=True)


# -- `lmi deploy stream`: send one request, and print the response as it arrives ---------------------------------------


def add_stream(commands: Any) -> None:
    parser = commands.add_parser("stream", help="send one request, and print the generated text as it arrives")
    add_endpoint_arguments(parser)
    add_body(parser)
    add_flags(parser, raw="print the raw bytes instead of the text", bidirectional=_BIDIRECTIONAL)
    parser.set_defaults(run=_stream)


def _stream(arguments: argparse.Namespace) -> int:
    predictor = predictor_of(arguments, bidirectional=arguments.bidirectional)
    with predictor.predict_stream(body_of(arguments), **options_of(arguments)) as stream:
        if arguments.raw:
            for part in stream.bytes():
                sys.stdout.buffer.write(part)
                sys.stdout.buffer.flush()
            return 0
        try:
            for piece in stream.text():
                _print(piece)
        except RequestFailed:
            print()
            raise
        print()
    return 0


# -- `lmi deploy chat`: chat with a model, on a terminal or from a pipe ------------------------------------------------


_HELP = (
    "/reset forgets the conversation, /system TEXT sets the system prompt, /quit exits. "
    "Ctrl-C stops a response, or clears the line."
)


def add_chat(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="chat with the model",
        description=f"Each line is a message. {_HELP} When input is piped, each line is sent after the "
        "response to the previous line.",
    )
    add_endpoint_arguments(parser)
    add_parameters(parser)
    parser.add_argument("--system", default="", metavar="TEXT", help="the system prompt")
    add_flags(parser, bidirectional=_BIDIRECTIONAL)
    parser.set_defaults(run=_chat)


def _chat(arguments: argparse.Namespace) -> int:
    predictor = predictor_of(arguments, bidirectional=arguments.bidirectional)
    conversation = Conversation(predictor, arguments.system, parameters_of(arguments))
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives input() a history and line editing
        print(_HELP, file=sys.stderr)
    while (line := _line(terminal)) is not None:
        if line.startswith("/"):
            if not _command(conversation, line):
                return 0
        elif line:
            _print_response(conversation, line, terminal)
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
    """Run a slash command, and return False if it ends the conversation."""
    name, _, text = line.partition(" ")
    if name == "/quit":
        return False
    if name == "/reset":
        conversation.reset()
    elif name == "/system":
        conversation.system = text.strip()
    else:
        print(f"{name}: no such command. {_HELP}", file=sys.stderr)
    return True


def _print_response(conversation: Conversation, line: str, terminal: bool) -> None:
    """Print the response to a message. Raises RequestFailed unless a user at a terminal can try again."""
    pieces = conversation.ask(line)
    try:
        for piece in pieces:
            _print(piece)
    except KeyboardInterrupt:
        print(" ...", end="")
    except RequestFailed as error:
        if not terminal:
            raise
        print(f"{error}\n{error.advice}".strip(), file=sys.stderr)
    finally:
        pieces.close()  # type: ignore[attr-defined]
        print(flush=True)
