"""`lmi deploy local --aws`: AWS on this machine, in which deployments can be rehearsed."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from deploy.errors import DeployError
from deploy.local.serving import Plan, serve

_NEEDED = ("moto", "flask", "policy_sentry")
_OTHERS = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_SAGEMAKER", "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME")
"""Variables that would lead a client elsewhere."""
_NOT_WITH_AWS = {
    "endpoint_name": "endpoints have the names that you create them with",
    "adapters": "an adapter is a component that you create",
    "s3": "S3 is here too",
    "host": "any keys are accepted, so it listens on 127.0.0.1 only",
}


def add(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a rehearsal")
    group.add_argument(
        "--aws",
        action="store_true",
        help="stand for AWS as a whole (moto): `lmi deploy up` creates endpoints here, and this container answers for "
        "all of them; needs the extra `rehearse`",
    )
    group.add_argument(
        "--image",
        dest="images",
        action="append",
        metavar="REPOSITORY:TAG",
        help="with --aws, an image that is in ECR, as nothing can be pushed; repeatable "
        f"(default: lmi-handler:{version('lmi-handler')})",
    )


def plan(arguments: argparse.Namespace, plan: Plan) -> Plan:
    """Return the plan of a rehearsal.

    Raises:
        DeployError: a package is missing, or an argument is not for a rehearsal.
    """
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise DeployError(f"--aws needs {', '.join(missing)}: pip install 'lmi-handler[rehearse]'")
    for name, why in _NOT_WITH_AWS.items():
        if getattr(arguments, name) not in (_defaults()[name], [], None):
            option = {"adapters": "adapter"}.get(name, name.replace("_", "-"))
            raise DeployError(f"--{option} cannot be set with --aws: {why}")
    if plan.endpoint.components:
        raise DeployError(
            f"{arguments.model} has components, and --aws has one container for all endpoints",
            f"Name a model, or none, and create the components with `lmi deploy up {arguments.model}`.",
        )
    for image in _images(arguments):
        if not all(image.rpartition(":")):
            raise DeployError(f"--image {image}: must be REPOSITORY:TAG, e.g. lmi-handler:{version('lmi-handler')}")
    return replace(plan, endpoint=replace(plan.endpoint, name="*", region=None))


def run(arguments: argparse.Namespace, plan: Plan, report: Callable[[str], None]) -> int:
    """Serve until SIGINT or SIGTERM; return the exit status."""
    from deploy.rehearsal.account import account, variables
    from deploy.rehearsal.logs import ContainerLog

    logging.getLogger("urllib3").setLevel(logging.ERROR)  # which tells of each connection that it does not keep
    region = arguments.region or os.environ.get("AWS_REGION") or "us-east-1"
    container_log = ContainerLog()

    def log(_: str, line: str) -> None:
        container_log.add(line)
        report(f"container | {line}")

    def ready(url: str) -> None:
        print("# AWS is on this machine now. In another terminal:")
        print(f"unset {' '.join(_OTHERS)}")
        for name, value in {**variables(url, region), **_no_proxy()}.items():
            print(f"export {name}={shlex.quote(value)}")
        print(f"# In ECR: {', '.join(_images(arguments))}. Ctrl-C ends it, and nothing is kept.", flush=True)

    return asyncio.run(serve(plan, report, log, ready, account(container_log, _images(arguments), region)))


def _images(arguments: argparse.Namespace) -> list[str]:
    return arguments.images or [f"lmi-handler:{version('lmi-handler')}"]


def _no_proxy() -> dict[str, str]:
    """Return what keeps a proxy out of the way, if the shell has one."""
    if not any(os.environ.get(name) for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")):
        return {}
    others = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
    both = ",".join(filter(None, [others, "127.0.0.1"]))
    return {"NO_PROXY": both, "no_proxy": both}


def _defaults() -> dict[str, Any]:
    return {"endpoint_name": "local", "adapters": [], "s3": None, "host": "127.0.0.1"}
