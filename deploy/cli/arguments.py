"""Arguments of several commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.deployer.shadow import Share
from deploy.errors import SpecError
from deploy.spec.reading import read_spec

if TYPE_CHECKING:
    from deploy.spec import Spec

_SHORT = {
    "name": ("name", "the endpoint's name"),
    "region": ("region", "AWS region"),
    "role": ("role", "ARN of the execution role"),
    "image": ("image.uri", "the container image's URI"),
    "model": ("model.id", "a hub's model name"),
    "instance-type": ("instance.type", "SageMaker instance type, or auto"),
    "count": ("instance.count", "instances"),
}
"""Short flags for the most common settings: name in the specification, and meaning."""


def add_spec(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", nargs="?", type=Path, metavar="FILE", help="the specification (YAML or JSON)")
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set one value of it, e.g. instance.type=ml.g5.xlarge; may be given again",
    )
    for flag, (name, meaning) in _SHORT.items():
        parser.add_argument(
            f"--{flag}", dest=f"spec_{name}", metavar=flag.upper(), help=f"{meaning} (--set {name}=...)"
        )


def spec_of(arguments: argparse.Namespace) -> Spec:
    """Return the specification of the arguments.

    Raises:
        SpecError: it is invalid.
    """
    short = [
        f"{name}={value}" for name, _ in _SHORT.values() if (value := getattr(arguments, f"spec_{name}")) is not None
    ]
    return read_spec(arguments.spec, short + arguments.settings)


def add_shadow(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shadow", action="store_true", help="beside an endpoint of another owner, as a shadow variant"
    )
    default = Share()
    parser.add_argument(
        "--shadow-percent",
        type=_number(100),
        metavar="P",
        help=f"with --shadow: percentage of the requests that are copied to it (default: {default.percent})",
    )
    parser.add_argument(
        "--shadow-count",
        type=_number(1000),
        metavar="N",
        help=f"with --shadow: its instances (default: {default.count})",
    )


def share_of(arguments: argparse.Namespace) -> Share | None:
    """Return the shadow's share; None: no shadow is asked for.

    Raises:
        SpecError: an argument is for a shadow only.
    """
    percent, count = arguments.shadow_percent, arguments.shadow_count
    if arguments.shadow:
        if arguments.adopt:
            raise SpecError("--adopt takes the endpoint over, --shadow leaves it to its owner", "Give one of the two.")
        default = Share()
        return Share(default.percent if percent is None else percent, default.count if count is None else count)
    if percent is not None or count is not None:
        raise SpecError(f"--shadow-{'count' if percent is None else 'percent'} is for --shadow", "Give both, or none.")
    return None


def _number(most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {most}")
        return int(text)

    return number


def add_endpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the endpoint's name")
    parser.add_argument("--region", help="AWS region (default: what boto3 is set to)")
