"""`lmi deploy local`: run the container's process and the Runtime API on this machine."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

from deploy.cli.endpoint import rehearsal
from deploy.errors import DeployError
from deploy.local.container import command
from deploy.local.endpoint import Component, Endpoint, Limits
from deploy.local.health import Probing
from deploy.local.serving import Plan, free_port, serve

BASE = "base"
"""The component of the model itself, if there are adapters."""

_SNIPPET = (
    "  import boto3\n"
    '  runtime = boto3.client("sagemaker-runtime", "{region}", endpoint_url="{url}", '
    'aws_access_key_id="x", aws_secret_access_key="x")\n'
    '  print(runtime.invoke_endpoint(EndpointName="{name}",{component} ContentType="application/json", '
    """Body='{{"inputs": "The capital of France is"}}')["Body"].read().decode())"""
)


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "local",
        help="run the container and SageMaker's API on this machine",
        description="Start the container without Docker, and SageMaker Runtime's API in front of it: boto3 with "
        "endpoint_url talks to it as to an endpoint (documents: local).",
    )
    parser.add_argument(
        "model",
        nargs="?",
        help="a .gguf file, a model directory, or a name on the Hugging Face hub (default: the demo model)",
    )
    parser.add_argument("--port", type=_port, default=8081, help="port of the API; 0: a free one (default %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--endpoint-name", default="local", metavar="NAME", help="(default %(default)s)")
    parser.add_argument("--region", help="refuse requests that are signed for another region (default: accept any)")
    _add_container(parser)
    _add_limits(parser)
    rehearsal.add(parser)
    parser.set_defaults(run=_run)


def _add_container(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the container")
    group.add_argument("--container", metavar="URL", help="one that runs already, e.g. http://127.0.0.1:8080")
    group.add_argument("--container-port", type=_port, metavar="PORT", help="where it listens (default: a free one)")
    group.add_argument("--engine", help="option.llm_engine")
    group.add_argument(
        "-o",
        "--set",
        dest="options",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option as in serving.properties; repeatable",
    )
    group.add_argument(
        "--adapter",
        dest="adapters",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help=f"a LoRA adapter, as the inference component NAME; the model itself is then "
        f"the component {BASE}; may be given again",
    )
    group.add_argument(
        "--start-timeout",
        type=_seconds,
        default=480.0,
        metavar="S",
        help="seconds until it must be ready (default %(default)g, as SageMaker's)",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("SageMaker's ways")
    group.add_argument("--invoke-timeout", type=_seconds, default=60.0, metavar="S", help="(default %(default)g)")
    group.add_argument("--stream-timeout", type=_seconds, default=480.0, metavar="S", help="(default %(default)g)")
    group.add_argument("--max-body", type=int, default=25 * 2**20, metavar="BYTES", help="(default %(default)s)")
    group.add_argument(
        "--part-bytes", type=_positive, metavar="N", help="cut a stream's parts at N bytes, to test clients"
    )
    group.add_argument("--s3", type=Path, metavar="DIRECTORY", help="stands for S3: takes asynchronous requests")


def _run(arguments: argparse.Namespace) -> int:
    plan = _plan(arguments)
    if arguments.aws:
        plan = rehearsal.plan(arguments, plan)
    elif arguments.images:
        raise DeployError("--image is for --aws: without it there is no ECR")
    logging.basicConfig(level=logging.INFO, format="runtime   | %(message)s", stream=sys.stderr)
    report = partial(print, file=sys.stderr, flush=True)
    if arguments.aws:
        return rehearsal.run(arguments, plan, report)
    component = f' InferenceComponentName="{BASE}",' if plan.endpoint.components else ""

    def ready(url: str) -> None:
        region = plan.endpoint.region or "us-east-1"
        print(f"endpoint {plan.endpoint.name} is InService: {url}")
        print(_SNIPPET.format(region=region, url=url, name=plan.endpoint.name, component=component), flush=True)

    return asyncio.run(serve(plan, report=report, log=lambda line: report(f"container | {line}"), ready=ready))


def _plan(arguments: argparse.Namespace) -> Plan:
    """Return the plan of the arguments.

    Raises:
        DeployError: the arguments contradict each other.
    """
    settings = {
        "a model": arguments.model,
        "--engine": arguments.engine,
        "-o": arguments.options,
        "--container-port": arguments.container_port,
    }
    if arguments.container and any(settings.values()):
        names = ", ".join(name for name, value in settings.items() if value)
        raise DeployError(f"--container is a container that runs already: {names} cannot be set for it")
    adapters = _adapters(arguments.adapters)
    options = arguments.options + (["option.enable_lora=true"] if adapters else [])
    port = arguments.container_port or free_port()
    url = (arguments.container or f"http://127.0.0.1:{port}").rstrip("/")
    components = {BASE: Component(), **{name: Component(name) for name in adapters}} if adapters else {}
    limits = Limits(arguments.invoke_timeout, arguments.stream_timeout, arguments.max_body)
    return Plan(
        Endpoint(
            url,
            arguments.endpoint_name,
            arguments.region,
            components=components,
            limits=limits,
            part_bytes=arguments.part_bytes,
        ),
        host=arguments.host,
        port=arguments.port,
        command=None if arguments.container else command(arguments.model, port, options, arguments.engine),
        adapters=adapters,
        probing=Probing(window=arguments.start_timeout),
        store=arguments.s3,
    )


def _adapters(settings: list[str]) -> dict[str, str]:
    adapters = {}
    for text in settings:
        name, equals, path = text.partition("=")
        if not name or not equals or not Path(path).is_dir():
            raise DeployError(f"--adapter {text}: must be NAME=PATH, the path of a directory")
        if name == BASE or name in adapters:
            raise DeployError(f"--adapter {text}: there is a component {name} already")
        adapters[name] = str(Path(path).resolve())
    return adapters


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError("must be a number from 0 to 65535")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError("must be a number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds < 86400:
        raise argparse.ArgumentTypeError("must be a number of seconds above 0")
    return seconds
