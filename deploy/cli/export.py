"""`lmi deploy export`: write a deployment for another tool."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from deploy.aws import Aws
from deploy.cli.arguments import add_flags, add_spec, spec_of
from deploy.export.cloudformation import cloudformation_template, template_notes, terraform_configuration
from deploy.export.sdk import sdk_program
from deploy.resolve.model.files import hub_to_ask
from deploy.resolve.resolver import resolve
from deploy.resources.build import resources, warnings


def add(commands: Any) -> None:
    parser = commands.add_parser("export", help="write the deployment for CloudFormation, Terraform or SageMaker's SDK")
    add_spec(parser)
    parser.add_argument(
        "--format",
        "--to",
        dest="format",
        choices=("cloudformation", "cloudformation-json", "terraform", "sdk"),
        default="cloudformation",
        help="output format: cloudformation is YAML, terraform is a main.tf.json with the template in it, and sdk is "
        "a program for SageMaker's Python SDK 3 (default: cloudformation)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="file to write (default: standard output)")
    add_flags(parser, "allow_plaintext_secret")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    spec = spec_of(arguments)
    region = Aws(spec.region).region
    decision = resolve(spec, region, hub=hub_to_ask()).decision
    built = resources(spec, decision, allow_plaintext_secret=arguments.allow_plaintext_secret)
    notes = [*warnings(spec, decision)]
    if arguments.format == "sdk":
        text = sdk_program(built, decision.region)
    elif arguments.format == "terraform":
        text = json.dumps(terraform_configuration(built, decision.region), indent=2)
    elif arguments.format == "cloudformation-json":
        text = json.dumps(cloudformation_template(built), indent=2)
    else:
        text = yaml.safe_dump(cloudformation_template(built), sort_keys=False, width=120).rstrip("\n")
    if arguments.format != "sdk":
        notes += template_notes(built)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if arguments.output is None:
        print(text)
    else:
        arguments.output.write_text(text + "\n")
    return 0
