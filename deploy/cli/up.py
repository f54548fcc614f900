"""`lmi deploy up`, `update`, `promote`: create or change a deployment."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console

from deploy.aws import Aws
from deploy.cli.arguments import add_flags, add_shadow, add_spec, down_command, share_of, spec_of
from deploy.cli.views import (
    confirm,
    live_progress,
    out,
    plan_as_json,
    print_and_refuse,
    print_plan,
    print_warnings,
    say,
    upload_progress,
)
from deploy.deployer.apply import ApplyOptions, Run, apply, look_when_idle, to_the_end
from deploy.deployer.preparation import Comparison, Preparation, prepare, upload_models
from deploy.deployer.release import compare_online
from deploy.deployer.shadow import Share, refuse_specification
from deploy.deployer.wait import time_limit
from deploy.errors import NotThere
from deploy.preflight.checks import over_the_network, preflight
from deploy.resolve.fit import Resolution
from deploy.resources.resource import TAG_BEFORE
from deploy.resources.updating import num_batches
from deploy.spec import Spec
from deploy.spec.components import uploads
from handler.core.command_line import print_json


def add(commands: Any) -> None:
    parser = _parser(commands, "up", "create the endpoint, or update it to match the file")
    add_adopt(parser)
    add_shadow(parser)


def add_adopt(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, adopt="take over another owner's resources with the same names")


def _parser(commands: Any, command: str, purpose: str) -> argparse.ArgumentParser:
    """Add the parser of `up`, `update` or `promote`, with the arguments that they share."""
    parser: argparse.ArgumentParser = commands.add_parser(command, help=purpose)
    add_spec(parser)
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask before the first change")
    add_flags(parser, "json", "no_checks", "allow_plaintext_secret", keep_failed="keep failed resources for inspection")
    parser.set_defaults(run=partial(deploy, command=command))
    return parser


def deploy(arguments: argparse.Namespace, command: str) -> int:
    """Run `up`, `update` or `promote`. If interrupted, print what was done so far. `update` needs an endpoint."""
    spec = spec_of(arguments)
    share = share_of(arguments) if command == "up" else None
    if share is not None or command == "promote":
        refuse_specification(spec)
    only = "" if share is None else " --shadow"
    aws = Aws(spec.region)
    work = partial(_deploy, aws, spec, out(aside=arguments.json), arguments, command, share)
    return to_the_end(work, again=f"{command}{only}", remove=f"{down_command(spec.deployment, aws.region)}{only}")


def _deploy(
    aws: Aws, spec: Spec, console: Console, arguments: argparse.Namespace, command: str, share: Share | None, run: Run
) -> int:
    preparation = prepare(spec, aws.region, aws, allow_plaintext_secret=arguments.allow_plaintext_secret)
    print_warnings(console, preparation.warnings)
    with live_progress(console) as report:
        options = ApplyOptions(
            say=lambda line: say(console, line),
            report=report,
            keep_failed=arguments.keep_failed,
            limit=time_limit(preparation.decision, batches=num_batches(spec), between=spec.update.wait),
        )
        live = look_when_idle(aws, spec.deployment, preparation.resources_in_order, options)
    if command == "update" and live.endpoint is None:
        raise NotThere(f"there is no endpoint {spec.endpoint_name} in {aws.region}", "`lmi deploy up` creates it.")
    preparation, comparison = compare_online(
        preparation, aws, live, adopt=arguments.adopt, share=share, promote=command == "promote"
    )
    spec = preparation.spec
    print_warnings(console, comparison.warnings)
    if not comparison.plan.changing:
        text = "already matches the specification, so there is nothing to do."
        say(console, f"{spec.name} {text}" if share is None else f"the shadow of {spec.name} {text}")
        return _end(arguments, preparation, comparison)
    print_plan(console, comparison.plan, whole=False)
    if not arguments.no_checks:
        # The plan already reports who owns the name.
        print_and_refuse(console, preflight(aws, spec, preparation.decision, fetch=over_the_network, without=("name",)))
    say(console, _instances(spec, preparation.resolution))
    if not confirm("Do this?", yes=arguments.yes, needed=False, aside=arguments.json):
        say(console, "Nothing was changed.")
        return _end(arguments, preparation, comparison, status=1)
    if uploads(spec):
        with upload_progress(console) as report_upload:
            upload_models(spec, aws, live, report_upload)
    with live_progress(console) as report:
        apply(aws, comparison.plan, preparation.resources_in_order, replace(options, report=report), run)
    before = live.config.tags.get(TAG_BEFORE) if command == "promote" and live.config is not None else None
    steps = [*_next_steps(spec, share, before)]
    say(console, "\n".join(steps))
    return _end(arguments, preparation, comparison, changed=True, next=steps, previous_config=before)


def _end(
    arguments: argparse.Namespace,
    preparation: Preparation,
    comparison: Comparison,
    *,
    status: int = 0,
    changed: bool = False,
    **more: Any,
) -> int:
    """Print the plan with `--json`, and whether it was carried out, and return the exit status.

    Args:
        more: further fields, which are empty if nothing was changed.
    """
    if arguments.json:
        warnings = [*preparation.warnings, *comparison.warnings]
        end = {"endpoint": preparation.spec.endpoint_name, "changed": changed, "next": [], "previous_config": None}
        region = preparation.decision.region
        print_json(plan_as_json(comparison.plan, **{**end, "region": region, "warnings": warnings, **more}))
    return status


def _next_steps(spec: Spec, share: Share | None, before: str | None) -> Iterator[str]:
    """Yield lines that tell the user what to do next.

    Args:
        before: name of the endpoint's previous configuration after `promote`, or None.
    """
    if share is not None:
        yield f"The shadow of {spec.name} gets copied requests. `promote` makes it serve; `down --shadow` removes it."
        return
    yield f"{spec.name} is in service. Try it: {first_request(spec)}"
    if before:
        yield f"To roll back: aws sagemaker update-endpoint --endpoint-name {spec.name} --endpoint-config-name {before}"


def first_request(spec: Spec) -> str:
    """Return a command that sends a request to the deployment, for the user to try."""
    component = f" --component {spec.components[0].name}" if len(spec.components) > 1 or spec.endpoint else ""
    if spec.asynchronous is not None:
        return f"lmi deploy invoke {spec.endpoint_name}{component} --async 'Hello'"
    return f"lmi deploy chat {spec.endpoint_name}{component}"


def _instances(spec: Spec, resolution: Resolution) -> str:
    """Return a phrase with the number, type and price of the instances that will be paid for."""
    if spec.endpoint is not None:
        return f"no instances of its own: the components run on the endpoint {spec.endpoint}"
    decision, prices, managed = resolution.decision, resolution.prices, spec.instance.managed
    count = f"{managed.min} to {managed.max}" if managed is not None else str(spec.instance.count)
    names = [pool.instance_type for pool in decision.pools] or [decision.instance_type]
    text = f"{count} x {', or '.join(f'{name}, {prices.of(name, spec.instance.price).each}' for name in names)}"
    if spec.shadow is not None and decision.shadow is not None:
        name = decision.shadow.instance_type
        text += f"; shadow: {spec.shadow.count} x {name}, {prices.of(name).each}"
    return f"{text}, as long as the endpoint exists"


# -- `lmi deploy update`: like `up`, but for an existing endpoint ------------------------------------------------------


def add_update(commands: Any) -> None:
    add_adopt(_parser(commands, "update", "update an existing endpoint, and roll back if an alarm is triggered"))


# -- `lmi deploy promote`: make a shadow beside another owner's endpoint the variant that serves -----------------------


def add_promote(commands: Any) -> None:
    parser = _parser(commands, "promote", "turn the shadow of `up --shadow` into the serving variant")
    parser.set_defaults(adopt=True)
