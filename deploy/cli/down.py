"""`lmi deploy down`: delete everything that belongs to a deployment."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from deploy.aws import Aws
from deploy.cli.arguments import add_flags, down_command
from deploy.cli.views import confirm, live_progress, out, print_plan, say
from deploy.deployer.apply import ApplyOptions, Run, apply, look_when_idle, to_the_end
from deploy.deployer.live import Live
from deploy.deployer.plan import Plan, removal_of_all
from deploy.deployer.shadow import plan_end
from deploy.deployer.teardown import check_users, delete_data, delete_logs, log_groups
from deploy.errors import SpecError
from deploy.resources.resource import Kind
from deploy.spec import Spec
from deploy.spec.components import deployment_of, is_guest, uploads
from deploy.spec.reading import read_spec


def add(commands: Any) -> None:
    parser = commands.add_parser("down", help="delete everything that belongs to a deployment")
    parser.add_argument("spec", nargs="?", type=Path, metavar="FILE", help="the specification, unless you pass --name")
    parser.add_argument("--name", help="name of the endpoint, instead of FILE")
    parser.add_argument("--endpoint", help="with --name: another deployment's endpoint, on which the components run")
    parser.add_argument("--region", help="AWS region (default: the file's region, or else boto3's setting)")
    add_flags(parser, shadow="remove only the shadow of `up --shadow`")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask for confirmation")
    add_flags(
        parser,
        logs="also delete the deployment's log groups",
        data="also delete the model data that up uploaded (needs FILE)",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if (file := arguments.spec) is not None and not file.suffix and not file.exists():
        raise SpecError(f"{file}: no such file", f"To delete that deployment: lmi deploy down --name {file}")
    spec = read_spec(file) if file is not None else None
    if spec is None and arguments.name is None:
        raise SpecError("pass the specification's file or --name")
    if arguments.data and (spec is None or not uploads(spec)):
        raise SpecError("--data needs a specification with model.upload, because without it `up` uploads nothing")
    if arguments.shadow and (arguments.data or arguments.logs or arguments.endpoint):
        raise SpecError("--shadow removes only the shadow", "Omit --data, --logs and --endpoint.")
    if spec is not None and arguments.name not in (None, spec.name):
        raise SpecError(f"--name is {arguments.name}, but the file's name is {spec.name}", "Pass only one of them.")
    if spec is not None and arguments.endpoint not in (None, spec.endpoint):
        raise SpecError(f"--endpoint is {arguments.endpoint}, but the file's endpoint is {spec.endpoint or spec.name}")
    name = spec.deployment if spec is not None else _deployment(arguments)
    only = "".join(f" --{flag}" for flag in ("shadow", "logs") if getattr(arguments, flag))
    aws = Aws(arguments.region or (spec.region if spec is not None else None))
    work = partial(_remove, aws, name, spec, out(), arguments)
    again = f"down{only}{' --data' * arguments.data}"
    return to_the_end(work, again=again, remove=f"{down_command(name, aws.region)}{only}")


def _deployment(arguments: argparse.Namespace) -> str:
    """Return the name of a deployment without a specification."""
    other_endpoint = arguments.endpoint if arguments.endpoint != arguments.name else None
    return deployment_of(arguments.name, other_endpoint)


def _remove(aws: Aws, name: str, spec: Spec | None, console: Console, arguments: argparse.Namespace, run: Run) -> int:
    with live_progress(console) as report:
        options = ApplyOptions(say=lambda line: say(console, line), report=report)
        live = look_when_idle(aws, name, (), options)
    if arguments.shadow:
        return _end_shadow(aws, live, console, run, arguments)
    planned = removal_of_all(live)
    prefixes = uploads(spec) if arguments.data and spec is not None else []
    for prefix in prefixes:
        check_users(
            aws, prefix, deleted_models=[existing.name for existing in live.owned if existing.kind is Kind.MODEL]
        )
    _print_removal(console, planned, f"{name} has no resources in {aws.region}.")
    also = ["its logs"] * arguments.logs + ["its model data"] * arguments.data
    if not planned.actions and not also:
        return 0
    if not confirm(f"Delete {' and '.join([name, *also])} permanently?", yes=arguments.yes, needed=True):
        return 1
    with live_progress(console) as report:
        apply(aws, planned, (), ApplyOptions(options.say, report), run)
    if arguments.logs:
        _delete_logs(aws, console, None if planned.dependents or is_guest(name) else name, live, spec)
    for prefix in prefixes:
        _delete_data(aws, console, prefix)
    say(console, f"{name} is deleted." if not planned.dependents else f"{name} is deleted, except for its endpoint.")
    return 0


def _print_removal(console: Console, planned: Plan, nothing: str) -> None:
    """Print what will be deleted and what will be kept. If nothing will be deleted, print the message `nothing`."""
    if planned.actions:
        print_plan(console, planned, whole=False)
    else:
        say(console, nothing)
    if planned.dependents:
        text = f"The endpoint is kept, as it runs components of other deployments: {', '.join(planned.dependents)}."
        say(console, f"{text} Run this command again after they are deleted.")


def _delete_logs(aws: Aws, console: Console, endpoint: str | None, live: Live, spec: Spec | None) -> None:
    components = {existing.name for existing in live.of(Kind.COMPONENT)}
    components |= {component.name for component in spec.components} if spec is not None else set()
    for group in delete_logs(aws, log_groups(endpoint, sorted(components))):
        say(console, f"deleted the log group {group}")


def _delete_data(aws: Aws, console: Console, prefix: str) -> None:
    removed, remaining = delete_data(aws, prefix)
    note = f"; {remaining} objects were not uploaded by lmi deploy, and are kept" if remaining else ""
    say(console, f"deleted {removed} objects under {prefix}{note}")


def _end_shadow(aws: Aws, live: Live, console: Console, run: Run, arguments: argparse.Namespace) -> int:
    planned = plan_end(live)
    if not planned.actions:
        say(console, f"{live.deployment} has no shadow in {aws.region}.")
        return 0
    print_plan(console, planned, whole=False)
    if not confirm(f"Remove the shadow of {live.deployment}?", yes=arguments.yes, needed=True):
        return 1
    resources = [action.resource for action in planned.actions if action.resource is not None]
    with live_progress(console) as report:
        apply(aws, planned, resources, ApplyOptions(lambda line: say(console, line), report), run)
    say(console, f"The shadow of {live.deployment} is removed.")
    return 0
