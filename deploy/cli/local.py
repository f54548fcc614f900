"""`lmi deploy local`: run the container as a process, and SageMaker's Runtime API, on this machine."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from deploy.cli.arguments import number, seconds
from deploy.emulator.container import Command, Probing, command
from deploy.emulator.endpoint import Endpoint, EndpointComponent, Limits
from deploy.emulator.serving import Front, LocalPlan, endpoint_front, free_port, serve
from deploy.emulator.specification import OF_ADAPTERS, started, this_machine, with_arguments
from deploy.errors import DeployError
from deploy.spec.reading import read_spec
from handler.core.command_line import add_repeatable, port
from handler.core.package import install

_NEEDED = ("moto", "flask", "policy_sentry")
_CONFLICTING = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_SAGEMAKER", "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME")
"""Environment variables that would direct a client to other endpoints or accounts."""
_NOT_WITH_AWS = {
    "endpoint_name": "endpoints have the names under which you create them",
    "adapters": "an adapter is a component that you create",
    "bidirectional_port": "bidirectional streams are emulated only for one endpoint",
    "host": "the emulator accepts all keys, so it listens only on 127.0.0.1",
}


def add_emulation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("emulation of AWS")
    group.add_argument(
        "--aws",
        action="store_true",
        help="emulate all of AWS (with moto): `lmi deploy up` creates endpoints here, all of which this container "
        "serves; needs the extra `rehearse`",
    )
    group.add_argument(
        "--image",
        dest="images",
        action="append",
        metavar="REPOSITORY:TAG",
        help="with --aws: image that exists in the emulated ECR, to which nothing can be pushed; repeatable "
        f"(default: lmi-handler:{version('lmi-handler')})",
    )


def emulated(arguments: argparse.Namespace, plan: LocalPlan) -> LocalPlan:
    """Return a plan in which one container serves all endpoints of an emulated AWS.

    Raises:
        DeployError: a package is missing, or an argument does not apply to the emulation of AWS.
    """
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise DeployError(f"--aws needs {', '.join(missing)}: {install('lmi-handler[rehearse]')}")
    for name, reason in _NOT_WITH_AWS.items():
        if getattr(arguments, name) not in ("127.0.0.1", [], None):
            option = {"adapters": "adapter"}.get(name, name.replace("_", "-"))
            raise DeployError(f"--{option} cannot be combined with --aws: {reason}")
    if plan.endpoint.components:
        raise DeployError(
            f"{arguments.model} has components, but with --aws one container serves all endpoints",
            f"Pass a model or no argument, and create the components with `lmi deploy up {arguments.model}`.",
        )
    for image in _images(arguments):
        if not all(image.rpartition(":")):
            raise DeployError(f"--image {image}: must be REPOSITORY:TAG, e.g. lmi-handler:{version('lmi-handler')}")
    return replace(plan, endpoint=replace(plan.endpoint, name="*", region=None))


def run_emulation(arguments: argparse.Namespace, plan: LocalPlan, report: Callable[[str], None]) -> int:
    """Serve until SIGINT or SIGTERM, and return the exit status."""
    from deploy.emulator.account import ContainerLog, account, variables

    logging.getLogger("urllib3").setLevel(logging.ERROR)  # urllib3 logs every connection that it discards
    region = arguments.region or os.environ.get("AWS_REGION") or "us-east-1"
    container_log = ContainerLog()

    def log(_: str, line: str) -> None:
        container_log.add(line)
        report(f"container | {line}")

    def ready(url: str) -> None:
        print("# AWS is now emulated on this machine. In another terminal:")
        print(f"unset {' '.join(_CONFLICTING)}")
        for name, value in {**variables(url, region), **_no_proxy()}.items():
            print(f"export {name}={shlex.quote(value)}")
        print(f"# In ECR: {', '.join(_images(arguments))}. Ctrl-C stops the emulation; nothing is kept.", flush=True)

    return asyncio.run(serve(plan, report, log, ready, account(container_log, _images(arguments), region)))


def _images(arguments: argparse.Namespace) -> list[str]:
    return arguments.images or [f"lmi-handler:{version('lmi-handler')}"]


def _no_proxy() -> dict[str, str]:
    """Return environment variables that bypass the proxy for 127.0.0.1, or {} if no proxy is set."""
    if not any(os.environ.get(name) for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")):
        return {}
    no_proxy = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
    both = ",".join(filter(None, [no_proxy, "127.0.0.1"]))
    return {"NO_PROXY": both, "no_proxy": both}


BASE = "base"
"""Name of the component that serves the model itself. Without adapters, there is no such component."""

_NAME = "local"
_SPECIFICATION = (".yaml", ".yml", ".json")

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
        help="run the container and SageMaker's Runtime API on this machine",
        description="Start the container without Docker, with SageMaker's Runtime API in front of it. boto3 can call "
        "it like an endpoint if endpoint_url is set.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        help="a .gguf file, a model directory, or a name on the Hugging Face hub (default: the demo model); or a "
        "specification (.yaml, .json), of which each component runs as a process",
    )
    parser.add_argument(
        "--port", type=port, default=8081, help="port of the API, or 0 for any free port (default: %(default)s)"
    )
    parser.add_argument(
        "--bidirectional-port",
        type=port,
        metavar="PORT",
        help="serve InvokeEndpointWithBidirectionalStream on this port, or on any free port for 0; needs the extra "
        "`bidirectional`",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--endpoint-name", metavar="NAME", help=f"name (default: the specification's or else {_NAME})")
    parser.add_argument("--region", help="refuse requests that are signed for another region (default: accept any)")
    _add_container(parser)
    _add_limits(parser)
    add_emulation(parser)
    parser.set_defaults(run=_run)


def _add_container(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("container")
    group.add_argument("--container", metavar="URL", help="URL of a running container, such as http://127.0.0.1:8080")
    group.add_argument("--container-port", type=port, metavar="PORT", help="container port (default: a free port)")
    group.add_argument("--engine", help="option.llm_engine")
    group.add_argument(
        "-o",
        "--set",
        dest="options",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option in the form of serving.properties; repeatable",
    )
    adapter = f"LoRA adapter to serve as the inference component NAME, beside the model's own component {BASE}"
    add_repeatable(group, "--adapter", "adapters", "NAME=PATH", adapter)
    group.add_argument(
        "--start-timeout",
        type=_limit,
        default=480.0,
        metavar="S",
        help="seconds within which the container must be ready (default: %(default)g, as on SageMaker)",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("SageMaker's limits")
    for flag, default, noun in ("--invoke-timeout", 60.0, "response"), ("--stream-timeout", 480.0, "streamed response"):
        text = f"seconds for a {noun} (default: %(default)g)"
        group.add_argument(flag, type=_limit, default=default, metavar="S", help=text)
    group.add_argument(
        "--max-body", type=int, default=25 * 2**20, metavar="BYTES", help="maximum request body (default: %(default)s)"
    )
    group.add_argument(
        "--part-bytes", type=number(2**31), metavar="N", help="split streams into parts of N bytes, to test clients"
    )


def _run(arguments: argparse.Namespace) -> int:
    plan = _plan(arguments)
    if arguments.aws:
        plan = emulated(arguments, plan)
    elif arguments.images:
        raise DeployError("--image applies only with --aws, which emulates ECR")
    logging.basicConfig(level=logging.INFO, format="runtime   | %(message)s", stream=sys.stderr)
    report = partial(print, file=sys.stderr, flush=True)
    if arguments.aws:
        return run_emulation(arguments, plan, report)
    first = next(iter(plan.endpoint.components), None)
    component = "" if first is None else f' InferenceComponentName="{first}",'

    def ready(url: str) -> None:
        region = plan.endpoint.region or "us-east-1"
        print(f"endpoint {plan.endpoint.name} is InService: {url}")
        print(_SNIPPET.format(region=region, url=url, name=plan.endpoint.name, component=component), flush=True)

    def log(component: str, line: str) -> None:
        report(f"{component or 'container'} | {line}")

    front: Front = endpoint_front
    if arguments.bidirectional_port is not None:
        front = _bidirectional(arguments.bidirectional_port)
    return asyncio.run(serve(plan, report=report, log=log, ready=ready, front=front))


def _bidirectional(port: int) -> Front:
    """Return a front with InvokeEndpointWithBidirectionalStream.

    Raises:
        DeployError: a package is missing.
    """
    try:
        from deploy.emulator.bidirectional import with_bidirectional_streams
    except ImportError as error:
        raise DeployError(f"--bidirectional-port needs {error.name}: {install('lmi-handler[bidirectional]')}") from None
    return partial(with_bidirectional_streams, port)


def _plan(arguments: argparse.Namespace) -> LocalPlan:
    """Return the plan that the arguments describe.

    Raises:
        DeployError: the arguments contradict each other.
    """
    if arguments.container:
        _refuse_settings_of_container(arguments)
    if arguments.model and arguments.model.endswith(_SPECIFICATION) and Path(arguments.model).is_file():
        return _plan_of_specification(arguments)
    adapters = _adapters(arguments.adapters, (BASE,))
    options = [*arguments.options, *(OF_ADAPTERS if adapters else ())]
    port = arguments.container_port or free_port()
    url = (arguments.container or f"http://127.0.0.1:{port}").rstrip("/")
    components = {BASE: EndpointComponent(), **{name: EndpointComponent(name) for name in adapters}} if adapters else {}
    commands = {} if arguments.container else {"": command(arguments.model, port, options, arguments.engine)}
    return _planned(arguments, url, _NAME, components, commands, adapters)


def _refuse_settings_of_container(arguments: argparse.Namespace) -> None:
    settings = {
        "a model": arguments.model,
        "--engine": arguments.engine,
        "-o": arguments.options,
        "--container-port": arguments.container_port,
    }
    if names := ", ".join(name for name, value in settings.items() if value):
        raise DeployError(f"--container cannot be combined with {names}, as the container is already running")


def _plan_of_specification(arguments: argparse.Namespace) -> LocalPlan:
    """Return the plan for a specification, with one process for each component.

    Raises:
        DeployError, SpecError: the file is invalid, conflicts with an argument, or cannot run here.
    """
    if arguments.container_port is not None:
        raise DeployError("--container-port applies to one container, but a specification may have several")
    spec = with_arguments(read_spec(Path(arguments.model)), arguments.options, arguments.engine)
    plan = started(spec, free_port, machine=this_machine(), adapters=_adapters(arguments.adapters, ()))
    for note in plan.notes:
        print(f"note: {note}", file=sys.stderr)
    urls = [item.container for item in plan.components.values() if item.container] or [plan.commands[""].url]
    return _planned(arguments, urls[0], spec.name, plan.components, plan.commands, plan.adapters)


def _planned(
    arguments: argparse.Namespace,
    url: str,
    name: str,
    components: Mapping[str, EndpointComponent],
    commands: Mapping[str, Command],
    adapters: Mapping[str, str],
) -> LocalPlan:
    endpoint = Endpoint(
        url,
        arguments.endpoint_name or name,
        arguments.region,
        components=components,
        limits=Limits(arguments.invoke_timeout, arguments.stream_timeout, arguments.max_body),
        part_bytes=arguments.part_bytes,
    )
    probing = Probing(window=arguments.start_timeout)
    return LocalPlan(
        endpoint, host=arguments.host, port=arguments.port, commands=commands, adapters=adapters, probing=probing
    )


def _adapters(settings: list[str], taken: tuple[str, ...]) -> dict[str, str]:
    adapters = {}
    for text in settings:
        name, equals, path = text.partition("=")
        if not name or not equals or not Path(path).is_dir():
            raise DeployError(f"--adapter {text}: must be NAME=PATH, where PATH is a directory")
        if name in taken or name in adapters:
            raise DeployError(f"--adapter {text}: the component {name} already exists")
        adapters[name] = str(Path(path).resolve())
    return adapters


def _limit(text: str) -> float:
    if (limit := seconds(text)) == 0:
        raise argparse.ArgumentTypeError("must be greater than 0")
    return limit
