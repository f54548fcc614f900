"""`lmi deploy iam`: print the IAM policies that a deployment needs, or check what they allow."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

from deploy.aws import Aws
from deploy.cli.arguments import add_flags, add_spec, spec_of
from deploy.errors import Refused
from deploy.iam.policies import MOST, Policy, length, parts, policies
from deploy.iam.simulation import caller, denials
from deploy.resolve.model.files import hub_to_ask
from deploy.resolve.resolver import resolve
from handler.core.command_line import print_json

_WHO = ("trust", "execution-role", "deployer", "invoker", "checker")


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "iam", help="print the IAM policies of the execution role, the deployer, the invoker and the checker"
    )
    add_spec(parser)
    parser.add_argument(
        "--who",
        type=_who,
        metavar="WHO",
        help=f"print only one policy, in the aws command's format: {', '.join(_WHO)}, or a part (deployer-1)",
    )
    add_flags(
        parser,
        adopt="include what `--adopt`, `--shadow` and `promote` require",
        check="ask IAM which actions are denied (changes nothing)",
    )
    parser.add_argument(
        "--principal",
        metavar="ARN",
        help="with --check: principal to check (default: the role for the execution-role policy, else the caller)",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    spec = spec_of(arguments)
    aws = Aws(spec.region)
    documents = policies(spec, resolve(spec, aws.region, hub=hub_to_ask()).decision, adopt=arguments.adopt)
    if not arguments.check:
        return _print(documents, arguments.who)
    if arguments.who is not None and arguments.who not in documents:
        raise Refused(
            f"--check checks a whole policy, not the part {arguments.who}", f"Pass --who {_party(arguments.who)}."
        )
    if arguments.who == "trust":
        raise Refused("--who trust cannot be checked: IAM simulates what a principal may do, not who may assume a role")
    status = 0
    for who in [arguments.who] if arguments.who else ["execution-role", "deployer"]:
        principal = arguments.principal or (spec.role if who == "execution-role" else caller(aws))
        missing = denials(aws, principal, documents[who])
        print(f"{who}: {principal}: " + (f"{len(missing)} denied" if missing else "all allowed"))
        for denial in missing:
            print(f"  {denial.action} on {denial.resource}: {denial.decision}")
        status = 3 if missing else status
    return status


def _print(documents: dict[str, Policy], who: str | None) -> int:
    """Print all policies, or only the policy or part `who`. Policies that exceed the AWS limit are split into parts."""
    printed: dict[str, Policy] = {}
    for party, document in documents.items():
        pieces = parts(document)
        names = [party] if len(pieces) == 1 else [f"{party}-{number}" for number in range(1, len(pieces) + 1)]
        printed |= dict(zip(names, pieces, strict=True))
        if len(pieces) > 1 and who in (None, party):
            says = f"{party}: {length(document):,} characters, but a managed policy may have at most {MOST:,}"
            advice = f"It is split into {' and '.join(names)}: create and attach a policy for each part."
            if who == party:
                raise Refused(says, f"{advice} Print the first part with --who {names[0]}.")
            print(f"note: {says}. {advice}", file=sys.stderr)
    if who is not None and who not in printed:
        raise Refused(f"--who {who}: there is no such policy or part", f"The known names are {', '.join(printed)}.")
    print_json(printed if who is None else printed[who])
    return 0


def _who(text: str) -> str:
    if _party(text) not in _WHO:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(_WHO)}, or a part, such as deployer-1")
    return text


def _party(who: str) -> str:
    return re.sub(r"-[0-9]+$", "", who)
