"""`lmi deploy adopt`: write a specification for an endpoint that another tool created. It changes nothing in AWS."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from deploy.adopt.files import read_file, written
from deploy.adopt.live import read_endpoint, reading_policy, with_data
from deploy.adopt.specification import Adopted, Wishes, adopted
from deploy.adopt.variables import KINDS, escaped_line
from deploy.aws import Aws
from deploy.cli.arguments import add_flags
from deploy.errors import Refused, SpecError
from deploy.resolve.images import ECR_URI
from handler.core.command_line import print_json


def add(commands: Any) -> None:
    parser = commands.add_parser("adopt", help="write a specification for an endpoint that lmi deploy did not create")
    parser.add_argument("endpoint", nargs="?", metavar="ENDPOINT", help="the endpoint's name")
    parser.add_argument(
        "--file",
        type=Path,
        metavar="JSON",
        help="file to read instead of ENDPOINT: a model's configuration, JumpStart's specification or a job's output",
    )
    parser.add_argument(
        "--recommendation", type=int, default=1, metavar="N", help="number of the job's recommendation (default: 1)"
    )
    add_flags(parser, read_data="with --file: also read options from model data in S3")
    parser.add_argument("--output", type=Path, metavar="FILE", help="new file to write (default: standard output)")
    parser.add_argument("--name", help="the deployment's name (default: the endpoint's)")
    parser.add_argument("--region", help="AWS region (default: boto3's setting)")
    parser.add_argument("--role", metavar="ARN", help="execution role (default: the endpoint's)")
    parser.add_argument(
        "--image",
        help="image URI, or repository in this account (default: lmi-handler, or lmi-handler-llamacpp for llama.cpp)",
    )
    parser.add_argument("--model", help="model ID on the hub or s3://PREFIX/ (default: the endpoint's model)")
    parser.add_argument("--token-secret", metavar="ARN", help="ARN of the secret with the Hugging Face token")
    parser.add_argument(
        "--container",
        choices=list(KINDS),
        help="server in the endpoint's image, if the image's name does not show it; lmi-handler is this project",
    )
    parser.add_argument("--variant", help="production variant to adopt, if there are several; requires --name")
    add_flags(parser, "json", policy="print the IAM policy that adopt needs, and exit")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if (arguments.endpoint is None) == (arguments.file is None):
        raise SpecError("pass either the name of an endpoint or --file JSON")
    if arguments.policy:
        return _print_policy(arguments)
    if arguments.output is not None and arguments.output.exists():
        raise _there_already(arguments.output)
    if arguments.file is not None:
        source = read_file(arguments.file, arguments.recommendation, arguments.region or "")
        if arguments.read_data:
            source = with_data(Aws(arguments.region or source.region or None), source)
    else:
        source = read_endpoint(Aws(arguments.region), arguments.endpoint)
    wishes = Wishes(
        name=arguments.name,
        region=arguments.region,
        role=arguments.role,
        image=None if arguments.image is None else _image(arguments.image),
        model=arguments.model,
        token_secret=arguments.token_secret,
        container=arguments.container,
        variant=arguments.variant,
    )
    result = adopted(source, wishes)
    source_name = arguments.endpoint or f"--file {arguments.file.name}"
    text = written(result, f"lmi deploy adopt {source_name}")
    if arguments.output is not None:
        _write(arguments.output, text)
        print(f"wrote {arguments.output}", file=sys.stderr)
    if arguments.json:
        print_json(as_json(result, arguments.output))
        return 0
    if arguments.output is None:
        print(text, end="")
    for name, reason in result.unmapped:
        print(escaped_line(f"note: {name} cannot be mapped: {reason}"), file=sys.stderr)
    return 0


def as_json(result: Adopted, output: Path | None) -> dict[str, Any]:
    """Return an adopted specification and its comments as JSON.

    Args:
        output: file that contains the specification, or None if it was not written.
    """
    container = result.container
    lists = {name: getattr(result, name) for name in ("defaults", "unmapped", "differences", "idle")}
    return {
        "specification": result.content,
        "output": None if output is None else str(output),
        "container": container and {"kind": container.kind, "release": container.tagged_release},
        "notes": result.head,
        **{name: [{"setting": item, "reason": reason} for item, reason in items] for name, items in lists.items()},
    }


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise _there_already(path) from None
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from None


def _there_already(path: Path) -> Refused:
    return Refused(f"{path} already exists", "Pass another file name, or remove this file.")


def _image(text: str) -> dict[str, str]:
    if ECR_URI.fullmatch(text):
        return {"uri": text}
    name, _, tag = text.partition(":")
    return {"repository": name, "tag": tag} if tag else {"repository": name}


def _print_policy(arguments: argparse.Namespace) -> int:
    if arguments.endpoint is None:
        raise SpecError("--policy applies only to an endpoint, so it cannot be combined with --file", "Omit --policy.")
    if not re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", arguments.endpoint):
        raise SpecError(f"{arguments.endpoint}: is not a valid endpoint name")
    aws = Aws(arguments.region)
    print_json(reading_policy(arguments.endpoint, aws.region, aws.partition))
    return 0
