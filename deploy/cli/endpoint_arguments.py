"""Arguments of the commands that send requests to an endpoint."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from deploy.cli.arguments import add_endpoint
from deploy.client import NotStarted, Patience, Predictor
from deploy.client.aws.account import boto_session
from deploy.errors import DeployError
from handler.core.text_files import decode


def add_endpoint_arguments(parser: argparse.ArgumentParser) -> None:
    add_endpoint(parser)
    parser.add_argument("--component", metavar="NAME", help="inference component, or adapter's (default: the only one)")
    parser.add_argument(
        "--endpoint-url", type=url, metavar="URL", help="another address than AWS's: `lmi deploy local`"
    )
    parser.add_argument(
        "--patience",
        type=_seconds,
        metavar="S",
        help="try so long while nothing is begun (default: 60 s, without a copy 900 s)",
    )


def add_body(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "body",
        nargs="?",
        metavar="BODY",
        help="a JSON object is sent as it is, other text is a prompt; - reads standard input, "
        "@FILE from a file (default: -)",
    )
    parser.add_argument("--json", metavar="JSON", help="the body in place of BODY; any JSON value, or - or @FILE")
    add_parameters(parser)
    parser.add_argument("--custom-attributes", metavar="TEXT", help="as route=/v1/chat/completions")
    parser.add_argument("--inference-id", metavar="ID", help="the request's name in the container's log")


def add_parameters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-p",
        dest="parameters",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a generation parameter, as max_new_tokens=64; may be given again",
    )


def predictor_of(arguments: argparse.Namespace, **more: Any) -> Predictor:
    """Return the predictor of the arguments. Raises DeployError if no region is set."""
    patience = Patience() if arguments.patience is None else Patience(arguments.patience, arguments.patience)
    return Predictor(
        arguments.name,
        arguments.region,
        component=arguments.component,
        endpoint_url=arguments.endpoint_url,
        session=boto_session(arguments.region, arguments.endpoint_url),
        **{"patience": patience, "report": _print_retry, **more},
    )


def body_of(arguments: argparse.Namespace) -> Any:
    """Return the request's body.

    Raises:
        DeployError: the arguments contradict each other, or a file cannot be read.
    """
    parameters = parameters_of(arguments)
    if arguments.json is not None and arguments.body is not None:
        raise DeployError("give BODY or --json, not both")
    text = _read(arguments.json if arguments.json is not None else arguments.body or "-")
    try:
        body = json.loads(text)
    except ValueError as error:
        if arguments.json is not None:
            raise DeployError(f"--json: {error}") from None
        body = None
    if arguments.json is None and not isinstance(body, dict):
        body = {"inputs": text.rstrip("\n")}
    if not parameters:
        return body
    if not isinstance(body, dict):
        raise DeployError("-p: the body is not a JSON object")
    if "inputs" not in body:  # other schemas have parameters beside the prompt
        return {**body, **parameters}
    return {**body, "parameters": {**body.get("parameters", {}), **parameters}}


def parameters_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the generation parameters; a value is JSON, else text.

    Raises:
        DeployError: one has no value.
    """
    parameters: dict[str, Any] = {}
    for setting in arguments.parameters:
        name, separator, text = setting.partition("=")
        if not name or not separator:
            raise DeployError(f"-p {setting}: must be NAME=VALUE, as max_new_tokens=64")
        try:
            parameters[name] = json.loads(text)
        except ValueError:
            parameters[name] = text
    return parameters


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the request's headers."""
    return {"custom_attributes": arguments.custom_attributes, "inference_id": arguments.inference_id}


def _read(text: str) -> str:
    if text != "-" and not text.startswith("@"):
        return text
    try:
        return decode(sys.stdin.buffer.read() if text == "-" else Path(text[1:]).read_bytes())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise DeployError(f"{'standard input' if text == '-' else text[1:]}: {why}") from None


def _print_retry(error: NotStarted, pause: float) -> None:
    print(f"{error}; again in {pause:.0f} s", file=sys.stderr)


def url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError("must begin with http:// or https://, as http://127.0.0.1:8081")
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1
    if not 0 <= seconds < 86400:
        raise argparse.ArgumentTypeError("must be a number of seconds")
    return seconds
