"""`lmi deploy export`: write a deployment as CloudFormation, Terraform, or objects of Kubernetes."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from deploy.aws import Aws
from deploy.cli.arguments import add_spec, spec_of
from deploy.errors import SpecError
from deploy.export.cloudformation import cloudformation_template, template_notes, terraform_configuration
from deploy.export.hyperpod import hyperpod_manifests
from deploy.export.kubernetes import kserve_manifests, kubernetes_manifests, to_yaml
from deploy.resolve.decision import Decision
from deploy.resolve.model.files import hub_to_ask
from deploy.resolve.resolver import resolve
from deploy.resources.build import resources, warnings
from deploy.spec import Spec

_OF_AWS = ("cloudformation", "cloudformation-json", "terraform")
_OF_KUBERNETES = ("kserve", "hyperpod", "kubernetes")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "export", help="write the deployment for another tool: CloudFormation, Terraform, KServe, HyperPod, Kubernetes"
    )
    add_spec(parser)
    parser.add_argument(
        "--format",
        "--to",
        dest="format",
        choices=(*_OF_AWS, *_OF_KUBERNETES),
        default="cloudformation",
        help="format (default: cloudformation, in YAML; terraform: a main.tf.json with the template in it)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")
    parser.add_argument(
        "--prometheus", metavar="URL", help="hyperpod with scaling: the Prometheus that has the pods' metrics"
    )
    parser.add_argument("--allow-plaintext-secret", action="store_true", help="allow secrets in the environment")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    spec = spec_of(arguments)
    if arguments.prometheus is not None and arguments.format != "hyperpod":
        raise SpecError(f"--prometheus goes with --format hyperpod, not {arguments.format}")
    region = Aws(spec.region).region
    decision = resolve(spec, region, hub=hub_to_ask()).decision
    write = _aws if arguments.format in _OF_AWS else _kubernetes
    text, notes = write(spec, decision, arguments)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if arguments.output is None:
        print(text)
    else:
        arguments.output.write_text(text + "\n")
    return 0


def _aws(spec: Spec, decision: Decision, arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """Return the text in a format of AWS's resources, and the notes."""
    built = resources(spec, decision, allow_plaintext_secret=arguments.allow_plaintext_secret)
    if arguments.format == "terraform":
        text = json.dumps(terraform_configuration(built, decision.region), indent=2)
    elif arguments.format == "cloudformation-json":
        text = json.dumps(cloudformation_template(built), indent=2)
    else:
        text = yaml.safe_dump(cloudformation_template(built), sort_keys=False, width=120).rstrip("\n")
    return text, [*warnings(spec, decision), *template_notes(built)]


def _kubernetes(spec: Spec, decision: Decision, arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """Return the text in a format of Kubernetes, and the notes, which the text has as comments too."""
    secrets = {"allow_plaintext_secret": arguments.allow_plaintext_secret}
    if arguments.format == "hyperpod":
        manifests, notes = hyperpod_manifests(spec, decision, prometheus=arguments.prometheus, **secrets)
    else:
        of_format = {"kserve": kserve_manifests, "kubernetes": kubernetes_manifests}[arguments.format]
        manifests, notes = of_format(spec, decision, **secrets)
    return to_yaml(manifests, notes), [*decision.warnings, *notes]
