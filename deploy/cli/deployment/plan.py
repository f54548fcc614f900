"""`lmi deploy plan`: what `up` would do, every request of it; changes nothing."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from deploy.aws import Aws
from deploy.cli.arguments import add_spec, spec_of
from deploy.cli.console import out, say
from deploy.cli.views.plan import as_json, candidates_table, print_checks, print_plan, print_warnings
from deploy.deployer.preparation import Outlook, outlook


def add(commands: Any) -> None:
    parser = commands.add_parser("plan", help="print every request that up would make, and what it would change")
    add_spec(parser)
    parser.add_argument("--offline", action="store_true", help="ask AWS nothing: the plan as if nothing existed")
    parser.add_argument("--json", action="store_true", help="the plan as JSON")
    parser.add_argument("--adopt", action="store_true", help="plan to take over what bears a wanted name")
    parser.add_argument("--allow-plaintext-secret", action="store_true", help="let secrets stand in the environment")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    spec = spec_of(arguments)
    seen = outlook(
        spec,
        Aws(spec.region),
        offline=arguments.offline,
        adopt=arguments.adopt,
        allow_plaintext_secret=arguments.allow_plaintext_secret,
    )
    if arguments.json:
        decision = seen.prepared.decision
        more = {"region": decision.region, "account": decision.account, "instance_type": decision.instance_type}
        said = [{**asdict(check), "verdict": check.verdict.value} for check in seen.checks]
        print(as_json(seen.plan, **more, unasked=seen.unasked, warnings=list(seen.prepared.warnings), checks=said))
    else:
        _show(seen)
    return 0


def _show(seen: Outlook) -> None:
    console, decision = out(), seen.prepared.decision
    say(console, f"{seen.plan.deployment} in {decision.region}, account {decision.account}", "bold")
    if seen.unasked is not None:
        say(console, f"AWS was not asked ({seen.unasked}): this is the plan as if nothing existed.", "yellow")
    if seen.prepared.candidates is not None:
        console.print(candidates_table(seen.prepared.candidates))
    print_warnings(console, seen.prepared.warnings)
    print_checks(console, seen.checks)
    if seen.upload is not None:
        say(console, seen.upload)
    print_plan(console, seen.plan)
