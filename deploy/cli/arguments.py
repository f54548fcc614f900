"""Arguments of several commands."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

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


def add_endpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the endpoint's name")
    parser.add_argument("--region", help="AWS region (default: what boto3 is set to)")
