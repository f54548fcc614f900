"""`lmi deploy iam`: print the policies that a deployment needs, or check them."""

from __future__ import annotations

import argparse
import json
from typing import Any

from deploy.aws import Aws
from deploy.cli.arguments import add_spec, spec_of
from deploy.errors import Refused
from deploy.iam.policies import policies
from deploy.iam.simulation import caller, denials
from deploy.resolve.resolver import resolve

_WHO = ("trust", "execution-role", "deployer", "invoker")


def add(commands: Any) -> None:
    parser = commands.add_parser("iam", help="print the IAM policies of the role, the deployer and the invoker")
    add_spec(parser)
    parser.add_argument("--who", choices=_WHO, help="print one policy only, in the form of the aws command")
    parser.add_argument("--check", action="store_true", help="ask IAM for denied actions (changes nothing)")
    parser.add_argument(
        "--principal", metavar="ARN", help="with --check: whom to ask about (default: the role, and for --who deployer "
        "or invoker the caller)"
    )  # fmt: skip
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    spec = spec_of(arguments)
    aws = Aws(spec.region)
    documents = policies(spec, resolve(spec, aws.region).decision)
    if not arguments.check:
        print(json.dumps(documents[arguments.who] if arguments.who else documents, indent=2))
        return 0
    if arguments.who == "trust":
        raise Refused("--check: IAM simulates what somebody may do, not who may be a role", "Leave --who trust out.")
    status = 0
    for who in [arguments.who] if arguments.who else ["execution-role", "deployer"]:
        principal = arguments.principal or (spec.role if who == "execution-role" else caller(aws))
        missing = denials(aws, principal, documents[who])
        print(f"{who}: {principal}: " + (f"{len(missing)} denied" if missing else "all allowed"))
        for denial in missing:
            print(f"  {denial.action} on {denial.resource}: {denial.why}")
        status = 3 if missing else status
    return status
