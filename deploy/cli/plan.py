"""`lmi deploy plan`, `schema`: show what `up` would do, and the fields of a specification."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from deploy.aws import Aws
from deploy.cli.arguments import add_flags, add_shadow, add_spec, share_of, spec_of
from deploy.cli.views import (
    checks_as_json,
    components_as_json,
    fit_as_json,
    out,
    plan_as_json,
    print_candidates,
    print_checks,
    print_plan,
    print_sums,
    print_warnings,
    say,
)
from deploy.deployer.calls import unreachable_reason
from deploy.deployer.live import look
from deploy.deployer.preparation import Comparison, Preparation, compare_offline, prepare
from deploy.deployer.release import compare_online
from deploy.deployer.shadow import Share, refuse_specification
from deploy.errors import SpecError
from deploy.preflight.check import Check
from deploy.preflight.checks import over_the_network, preflight
from deploy.resolve.components import Sums
from deploy.resolve.fit import Resolution
from deploy.resolve.resolver import advice
from deploy.spec import Spec
from deploy.spec.fields import fields_of
from deploy.spec.reading import schema
from handler.core.command_line import print_json


def add(commands: Any) -> None:
    parser = commands.add_parser("plan", help="print the requests that `up` would send, and what they would change")
    add_spec(parser)
    add_flags(
        parser,
        offline="do not call AWS; plan as if no resources existed",
        adopt="plan to take over existing resources with the same names",
    )
    add_shadow(parser)
    add_flags(parser, "json", "bidirectional", "allow_plaintext_secret")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    spec, share = spec_of(arguments), share_of(arguments)
    if share is not None:
        refuse_specification(spec)
        if arguments.offline:
            raise SpecError("--shadow needs to read the existing endpoint", "Omit --offline.")
    aws = Aws(spec.region)
    reason = "--offline" if arguments.offline else None
    if reason is None:
        try:
            return _print_online(spec, aws, arguments, share)
        except (BotoCoreError, ClientError) as error:
            reason = unreachable_reason(error)
            if reason is None or share is not None:
                raise
    preparation = prepare(spec, aws.region, None, allow_plaintext_secret=arguments.allow_plaintext_secret)
    _print(preparation, compare_offline(preparation), (), reason, arguments)
    return 0


def _print_online(spec: Spec, aws: Aws, arguments: argparse.Namespace, share: Share | None) -> int:
    preparation = prepare(spec, aws.region, aws, allow_plaintext_secret=arguments.allow_plaintext_secret)
    live = look(aws, spec.deployment, preparation.resources_in_order)
    preparation, comparison = compare_online(preparation, aws, live, adopt=arguments.adopt, share=share)
    # The plan already reports who owns the name.
    checks = preflight(
        aws,
        preparation.spec,
        preparation.decision,
        fetch=over_the_network,
        without=("name",),
        bidirectional=arguments.bidirectional,
    )
    _print(preparation, comparison, checks, None, arguments)
    return 0


def _print(
    preparation: Preparation,
    comparison: Comparison,
    checks: Sequence[Check],
    reason: str | None,
    arguments: argparse.Namespace,
) -> None:
    """Print the plan.

    Args:
        checks: results of the preflight checks, or () if AWS was not called.
        reason: reason why AWS was not called, or None if it was called.
    """
    decision, resolution = preparation.decision, preparation.resolution
    warnings = [*preparation.warnings, *comparison.warnings]
    sums = comparison.sums or resolution.sums
    advised = advice(preparation.spec, decision, resolution.candidates)
    if arguments.json:
        more = {"unasked": reason, "warnings": warnings, "advice": advised, "checks": checks_as_json(checks)}
        print_json(plan_as_json(comparison.plan, **_resolution_as_json(resolution, sums), **more))
        return
    console = out()
    say(console, f"{comparison.plan.deployment} in {decision.region}, account {decision.account}", "bold")
    if reason is not None:
        say(console, f"AWS was not called ({reason}), so the plan assumes that no resources exist.", "yellow")
    if resolution.candidates is not None:
        print_candidates(console, resolution.candidates, resolution.prices)
    if sums is not None:
        print_sums(console, sums)
    print_warnings(console, warnings)
    for line in advised:
        say(console, f"advice: {line}", "dim")
    print_checks(console, checks)
    for line in map(str, comparison.uploads):  # the checks include their findings
        say(console, line)
    print_plan(console, comparison.plan)


def _resolution_as_json(resolution: Resolution, sums: Sums | None) -> dict[str, Any]:
    decision, chosen = resolution.decision, resolution.chosen
    more: dict[str, Any] = {name: getattr(decision, name) for name in ("region", "account", "instance_type")}
    if chosen is not None:
        price = {"usd_per_hour": chosen.price.usd, "exact": chosen.price.exact}
        more |= {"fit": {**fit_as_json(chosen), "remarks": chosen.remarks}, "price": price}
    return more if sums is None else {**more, "components": components_as_json(sums)}


# -- `lmi deploy schema`: print the specification's JSON schema, or the meaning of some fields -------------------------


def add_schema(commands: Any) -> None:
    parser = commands.add_parser("schema", help="print the specification's JSON schema, or what its fields mean")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a section or a field, such as scaling or model.id")
    parser.set_defaults(run=_print_schema)


def _print_schema(arguments: argparse.Namespace) -> int:
    if not arguments.names:
        print_json(schema())
        return 0
    rows = {name: fields_of(name) for name in arguments.names}
    if unknown := [name for name, fields in rows.items() if not fields]:
        raise SpecError(f"{unknown[0]}: the specification has no such section or field")
    for fields in rows.values():
        print("\n".join(f"{name}: {meaning}" for name, meaning in fields))
    return 0
