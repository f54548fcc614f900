"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.client import NotStarted, Patience, Predictor
from deploy.client.runtime import boto_session
from deploy.deployer.shadow import Share
from deploy.errors import DeployError, SpecError
from deploy.spec.components import is_guest, name_and_endpoint
from deploy.spec.reading import read_spec
from handler.core.command_line import add_repeatable
from handler.core.numbers import decimal, is_digits
from handler.core.text_files import decode

if TYPE_CHECKING:
    from deploy.spec import Spec

_SHORT = {
    "name": ("name", "the endpoint's name"),
    "region": ("region", "AWS region"),
    "role": ("role", "ARN of the execution role"),
    "image": ("image.uri", "the container image's URI"),
    "model": ("model.id", "model ID on the Hugging Face hub"),
    "instance-type": ("instance.type", "SageMaker instance type, or auto"),
    "count": ("instance.count", "number of instances"),
}
"""Maps the short flag of each common setting to its field in the specification and its description."""


_FLAGS = {
    "json": "print JSON; the exit status is the same",
    "bidirectional": "also check what bidirectional streams need: the image's label and the host AMI",
    "no_checks": "skip the preflight checks",
    "allow_plaintext_secret": "allow secrets in the environment",
}
"""Descriptions of flags that several commands have."""


def add_flags(parser: argparse.ArgumentParser, *shared: str, **flags: str) -> None:
    """Add flags without a value.

    Args:
        shared: names of flags in `_FLAGS`, which follow the other flags.
        flags: descriptions of flags by name.
    """
    for name, meaning in {**flags, **{name: _FLAGS[name] for name in shared}}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=meaning)


def add_spec(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", nargs="?", type=Path, metavar="FILE", help="the specification (YAML or JSON)")
    setting = "set one field of the specification, such as instance.type=ml.g5.xlarge"
    add_repeatable(parser, "--set", "settings", "KEY=VALUE", setting)
    for flag, (name, meaning) in _SHORT.items():
        parser.add_argument(
            f"--{flag}", dest=f"spec_{name}", metavar=flag.upper(), help=f"{meaning} (--set {name}=...)"
        )


def spec_of(arguments: argparse.Namespace) -> Spec:
    """Return the specification that the arguments describe.

    Raises:
        SpecError: the specification is invalid.
    """
    short = [
        f"{name}={value}" for name, _ in _SHORT.values() if (value := getattr(arguments, f"spec_{name}")) is not None
    ]
    return read_spec(arguments.spec, short + arguments.settings)


def add_shadow(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, shadow="run as a shadow variant on another owner's endpoint")
    default = Share()
    parser.add_argument(
        "--shadow-percent",
        type=number(100),
        metavar="P",
        help=f"with --shadow: percentage of requests to copy to the shadow (default: {default.percent})",
    )
    parser.add_argument(
        "--shadow-count",
        type=number(1000),
        metavar="N",
        help=f"with --shadow: number of the shadow's instances (default: {default.count})",
    )


def share_of(arguments: argparse.Namespace) -> Share | None:
    """Return the shadow's share of requests and instances, or None without --shadow.

    Raises:
        SpecError: the arguments contradict each other.
    """
    percent, count = arguments.shadow_percent, arguments.shadow_count
    if arguments.shadow:
        if arguments.adopt:
            raise SpecError("--adopt takes over the endpoint, but --shadow leaves it to its owner", "Pass one of them.")
        default = Share()
        return Share(default.percent if percent is None else percent, default.count if count is None else count)
    if percent is not None or count is not None:
        raise SpecError(
            f"--shadow-{'count' if percent is None else 'percent'} applies only with --shadow", "Pass both, or neither."
        )
    return None


def number(maximum: int) -> Callable[[str], int]:
    """Return a function that parses an integer from 1 to `maximum`."""

    def read(text: str) -> int:
        if not is_digits(text) or not 1 <= int(text) <= maximum:
            raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {maximum}")
        return int(text)

    return read


def down_command(deployment: str, region: str) -> str:
    """Return the `down` command that deletes a deployment without its file."""
    name, endpoint = name_and_endpoint(deployment)
    return f"down --name {name}{f' --endpoint {endpoint}' if is_guest(deployment) else ''} --region {region}"


def add_endpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the endpoint's name")
    parser.add_argument("--region", help="AWS region (default: boto3's setting)")


# -- arguments of the commands that send requests to an endpoint -------------------------------------------------------


def add_endpoint_arguments(parser: argparse.ArgumentParser) -> None:
    add_endpoint(parser)
    parser.add_argument("--component", metavar="NAME", help="component or adapter (default: the only component)")
    parser.add_argument(
        "--endpoint-url",
        type=url,
        metavar="URL",
        help="URL of the API to use instead of AWS, such as the URL that `lmi deploy local` prints",
    )
    parser.add_argument(
        "--patience",
        type=seconds,
        metavar="S",
        help="seconds to keep retrying until a response begins (default: 60, or 900 while no copy is running)",
    )


def add_body(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "body",
        nargs="?",
        metavar="BODY",
        help="the request's body: a JSON object is sent unchanged, other text is a prompt; - reads standard "
        "input, @FILE reads a file (default: -)",
    )
    parser.add_argument("--json", metavar="JSON", help="any JSON value as the body, instead of BODY; or - or @FILE")
    add_parameters(parser)
    parser.add_argument("--custom-attributes", metavar="TEXT", help="attributes such as route=/v1/chat/completions")
    parser.add_argument("--inference-id", metavar="ID", help="ID of the request in the container's log")


def add_parameters(parser: argparse.ArgumentParser) -> None:
    add_repeatable(parser, "-p", "parameters", "KEY=VALUE", "a generation parameter, such as max_new_tokens=64")


def predictor_of(arguments: argparse.Namespace, **more: Any) -> Predictor:
    """Return a predictor for the endpoint that the arguments name. Raises DeployError if no region is set."""
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
    """Return the request body.

    Raises:
        DeployError: the arguments contradict each other, or a file cannot be read.
    """
    parameters = parameters_of(arguments)
    if arguments.json is not None and arguments.body is not None:
        raise DeployError("pass either BODY or --json, not both")
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
        raise DeployError("-p sets a parameter, but the body is not a JSON object")
    if "inputs" not in body:  # other schemas have parameters at the top level
        return {**body, **parameters}
    return {**body, "parameters": {**body.get("parameters", {}), **parameters}}


def parameters_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the generation parameters. A value that is not JSON is taken as a string.

    Raises:
        DeployError: a parameter does not have the form KEY=VALUE.
    """
    parameters: dict[str, Any] = {}
    for setting in arguments.parameters:
        name, separator, text = setting.partition("=")
        if not name or not separator:
            raise DeployError(f"-p {setting}: must be KEY=VALUE, such as max_new_tokens=64")
        try:
            parameters[name] = json.loads(text)
        except ValueError:
            parameters[name] = text
    return parameters


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the request's custom attributes and inference ID, as arguments of `Predictor`."""
    return {"custom_attributes": arguments.custom_attributes, "inference_id": arguments.inference_id}


def _read(text: str) -> str:
    if text != "-" and not text.startswith("@"):
        return text
    try:
        return decode(sys.stdin.buffer.read() if text == "-" else Path(text[1:]).read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DeployError(f"{'standard input' if text == '-' else text[1:]}: {reason}") from None


def _print_retry(error: NotStarted, pause: float) -> None:
    print(f"{error}; retrying in {pause:.0f} s", file=sys.stderr)


def url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError("must be a URL, such as http://127.0.0.1:8081")
    return text


def seconds(text: str) -> float:
    try:
        value = decimal(text)
    except ValueError:
        value = -1
    if not 0 <= value < 86400:
        raise argparse.ArgumentTypeError("must be a number of seconds from 0 to 86399")
    return value
