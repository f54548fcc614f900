"""`lmi deploy doctor FILE`: run the preflight checks; `lmi deploy doctor NAME --live`: measure an endpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from deploy.aws import Aws
from deploy.cli.arguments import add_flags, add_spec, spec_of, url
from deploy.cli.views import checks_as_json
from deploy.client.runtime import boto_session, runtime_client
from deploy.errors import DeployError, SpecError
from deploy.operations.doctor import Target, measure, report
from deploy.preflight.check import Verdict
from deploy.preflight.checks import lines, over_the_network, preflight
from deploy.resolve.model.files import hub_to_ask
from deploy.resolve.prices import ask as ask_prices
from deploy.resolve.resolver import resolve
from handler.core.command_line import print_json

_WRONG = 2


def add(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="check a specification (FILE), or measure an endpoint (NAME --live)")
    add_spec(parser)
    add_flags(parser, live="send requests to an endpoint, whose NAME replaces FILE")
    parser.add_argument("--component", metavar="NAME", help="with --live: component to send requests to")
    parser.add_argument(
        "--endpoint-url", type=url, metavar="URL", help="with --live: the API's URL, as `lmi deploy local` prints it"
    )
    parser.add_argument(
        "--tokens", type=int, default=64, metavar="N", help="with --live: number of tokens to stream (default: 64)"
    )
    parser.add_argument(
        "--slow",
        type=int,
        default=0,
        metavar="N",
        help="with --live: also request N tokens, which should take more than a minute",
    )
    add_flags(parser, "json", "bidirectional", aws_only="do not contact the hub or registries")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    return _live(arguments) if arguments.live else _before(arguments)


def _before(arguments: argparse.Namespace) -> int:
    if arguments.endpoint_url is not None or arguments.component is not None:
        raise SpecError("--endpoint-url and --component apply only with --live", "Run `lmi deploy doctor NAME --live`.")
    spec = spec_of(arguments)
    aws = Aws(spec.region)
    # Resolve without calling AWS, as the checks then report all problems at once.
    account = aws.account()
    decision = resolve(spec, aws.region, account=account, hub=hub_to_ask(), prices=ask_prices(aws)).decision
    checks = preflight(
        aws,
        spec,
        decision,
        fetch=None if arguments.aws_only else over_the_network,
        bidirectional=arguments.bidirectional,
    )
    if arguments.json:
        print_json(checks_as_json(checks))
    else:
        print("\n".join(lines(checks)))
    return _WRONG if any(check.verdict is Verdict.ERROR for check in checks) else 0


def _live(arguments: argparse.Namespace) -> int:
    name = arguments.spec_name or (str(arguments.spec) if arguments.spec else None)
    if name is None or Path(name).suffix:
        raise DeployError("--live needs the endpoint's name", "Run `lmi deploy doctor NAME --live`.")
    region, address = arguments.spec_region, arguments.endpoint_url
    client = runtime_client(boto_session(region, address), region, address, read_timeout=130, connect_timeout=10)
    target = Target(client, name, arguments.component)
    findings = []
    for finding in measure(target, tokens=arguments.tokens, slow=arguments.slow):
        findings.append(finding)
        if not arguments.json:
            print(f"{finding.question}: {finding.answer}", flush=True)
    if arguments.json:
        print_json(report(name, findings))
    return 0 if findings[0].figures is not None else 1
