"""`lmi deploy batch`: process files of requests in S3 with a transform job, without an endpoint."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rich.console import Console

from deploy.aws import Aws
from deploy.batch.job import TransformJob, checks, settings_of, transform_job
from deploy.batch.running import create, describe, make_model, name_of, output_of, refuse_concurrent, stop, wait, where
from deploy.cli.arguments import add_flags, add_spec, spec_of
from deploy.cli.views import confirm, live_progress, out, print_and_refuse, print_warnings, say, upload_progress
from deploy.deployer.apply import interruptible, status_of
from deploy.deployer.live import look
from deploy.deployer.preparation import check_data, resolve_online, upload_models
from deploy.errors import SpecError
from deploy.preflight.checks import over_the_network, preflight
from deploy.resolve.prices import Prices
from deploy.spec import Spec

_SETTINGS = {"input": "S3 URI of the input: an object or a prefix", "output": "S3 URI of the prefix for the outputs"}


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "batch",
        help="process files of requests in S3, without an endpoint (batch transform)",
        description="Create a transform job, and wait until it ends. Each line of an input object is a request, and "
        "the same line of OBJECT.out is its response. Ctrl-C stops waiting, but not the job.",
    )
    add_spec(parser)
    for name, meaning in _SETTINGS.items():
        parser.add_argument(f"--{name}", metavar="S3URI", help=f"{meaning} (--set batch.{name}=...)")
    parser.add_argument("--job", metavar="NAME", help="name of the job (default: the deployment's name and a number)")
    add_flags(parser, no_wait="return as soon as the job is created")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask before the job is created")
    add_flags(parser, "no_checks", "allow_plaintext_secret")
    parser.add_argument("--resume", metavar="JOB", help="wait for an existing job instead of creating one")
    parser.add_argument("--stop", metavar="JOB", help="stop a job instead of creating one")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    console = out()
    if arguments.resume is not None or arguments.stop is not None:
        return _existing(console, arguments)
    arguments.settings = [*arguments.settings, *_settings(arguments)]
    spec = spec_of(arguments)
    settings_of(spec)  # before any call to AWS
    aws = Aws(spec.region)
    job = _prepared(console, aws, spec, arguments)
    if not confirm("Do this?", yes=arguments.yes, needed=False):
        say(console, "Nothing was created.")
        return 1
    if spec.model.upload is not None:
        with upload_progress(console) as report:
            upload_models(spec, aws, look(aws, spec.name), report)
    model_name = make_model(aws, spec.name, job)
    say(console, f"{'created' if model_name else 'found'} {job.model.key}")
    name = arguments.job or name_of(aws, job)
    say(console, f"creating transform-job/{name}")  # printed first, as the job may exist even if the call fails
    create(aws, job, name)
    if arguments.no_wait:
        say(console, _later(name, aws.region))
        return 0
    return _wait(console, aws, name, is_new=True)


def _settings(arguments: argparse.Namespace) -> list[str]:
    """Return the values of flags such as --input as settings of the `batch` section, each as NAME=VALUE."""
    return [f"batch.{name}={value}" for name in _SETTINGS if (value := getattr(arguments, name)) is not None]


def _existing(console: Console, arguments: argparse.Namespace) -> int:
    if arguments.resume is not None and arguments.stop is not None:
        raise SpecError("--resume and --stop cannot be combined", "Pass only one of them.")
    region = spec_of(arguments).region if arguments.spec is not None else arguments.spec_region
    aws = Aws(region)
    if arguments.stop is not None:
        say(console, stop(aws, arguments.stop))
        return 0
    return _wait(console, aws, arguments.resume)


def _prepared(console: Console, aws: Aws, spec: Spec, arguments: argparse.Namespace) -> TransformJob:
    """Build the job, check it, and print what will be created.

    Raises:
        Refused: a check found an error, or a running job writes to the same output.
    """
    resolution = resolve_online(spec, aws)
    decision = resolution.decision
    job = transform_job(spec, decision, allow_plaintext_secret=arguments.allow_plaintext_secret)
    print_warnings(console, job.warnings)
    refuse_concurrent(aws, spec.name, job)
    if spec.model.upload is not None:
        check_data(spec, aws, look(aws, spec.name))
    if not arguments.no_checks:
        # The checks of the endpoint's name and quota do not apply to a job.
        results = preflight(aws, spec, decision, fetch=over_the_network, without=("name", "quota"))
        print_and_refuse(console, [*results, *checks(aws, spec, decision)])
    say(console, _summary(spec, job, resolution.prices))
    return job


def _summary(spec: Spec, job: TransformJob, prices: Prices) -> str:
    batch, request = settings_of(spec), job.request
    name = request["TransformResources"]["InstanceType"]
    return (
        f"{batch.input} to {batch.output}, {request['MaxConcurrentTransforms']} concurrent lines per instance, "
        f"each of at most {request['MaxPayloadInMB']} MB; {spec.instance.count} x {name}, "
        f"{prices.of(name, spec.instance.price).each}, until the job ends"
    )


def _wait(console: Console, aws: Aws, name: str, *, is_new: bool = False) -> int:
    try:
        with interruptible(), live_progress(console) as report:
            uris = wait(aws, name, report, is_new=is_new)
    except KeyboardInterrupt as interrupt:
        print(f"Interrupted. {_later(name, aws.region)}", file=sys.stderr)
        return status_of(interrupt)
    for line in where(uris, output_of(describe(aws, name))):
        say(console, line)
    return 0


def _later(name: str, region: str) -> str:
    return (
        f"The job continues. To wait for it: lmi deploy batch --resume {name} --region {region}\n"
        f"To stop it: lmi deploy batch --stop {name} --region {region}"
    )
