"""The command line of `lmi conform`. It imports the rules only when it runs, so that `lmi serve` starts fast."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from handler.core.errors import ConfigError

if TYPE_CHECKING:
    from handler.conform.process import Lifetime
    from handler.conform.run import Plan, Result

PROFILES = ("sagemaker", "lmi-0.28", "lmi-0.38", "tgi", "openai", "anthropic", "triton")
_DESCRIPTION = """Ask a server what the public contracts of SageMaker's LLM containers promise. Every rule has an id, a
sentence and its source. It passes, fails (with what was asked and got), or is not asked (with the reason). A report in
Markdown goes to standard output. Ends with status 1 when a rule failed. A server with a key: LMI_API_KEY=KEY."""


def add_parser(commands: Any) -> None:
    """Add `conform` to `lmi`'s subcommands."""
    parser = commands.add_parser(
        "conform", help="check a server against SageMaker's, LMI's and others' contracts", description=_DESCRIPTION
    )
    parser.add_argument("url", nargs="?", help="the server, as http://host:port")
    parser.add_argument(
        "--profile",
        action="append",
        choices=PROFILES,
        help="the contract; may be given again (default sagemaker): SageMaker's platform, or the API of LMI 0.28, "
        "LMI 0.38, TGI, OpenAI, Anthropic or Triton",
    )
    parser.add_argument("--model", default="", metavar="NAME", help="name in requests (default: the first listed)")
    parser.add_argument(
        "--adapter", default="", metavar="NAME=DIRECTORY", help="a LoRA adapter, by its directory as the server sees it"
    )
    parser.add_argument(
        "--metrics",
        type=_path,
        default="/metrics",
        metavar="PATH",
        help="where its metrics are, as MetricsEndpointPath tells SageMaker (default %(default)s)",
    )
    end = parser.add_mutually_exclusive_group()
    end.add_argument(
        "--command",
        metavar="COMMAND",
        help="start the server at URL by this command, and end it: rules of start and stop",
    )
    end.add_argument(
        "--container",
        metavar="NAME",
        help="the running container at URL; it is stopped as SageMaker does: rules of stop",
    )
    parser.add_argument("--ready", type=_seconds, default=600.0, metavar="S", help="for a start (default %(default)s)")
    parser.add_argument(
        "--timeout", type=_seconds, default=60.0, metavar="S", help="for an answer (default %(default)s)"
    )
    parser.add_argument("--slow", action="store_true", help="ask rules that take minutes, too")
    parser.add_argument(
        "--rule", action="append", default=[], metavar="RULE", help="ask this rule, or group, alone; may be given again"
    )
    parser.add_argument(
        "--skip", action="append", default=[], metavar="RULE", help="leave out this rule, or group; may be given again"
    )
    report = parser.add_argument_group("report")
    report.add_argument("--title", metavar="TEXT", help="name of the server in reports (default: its URL)")
    report.add_argument(
        "--output",
        type=_report,
        action="append",
        default=[],
        metavar="FILE",
        help="save it as .md or .json; may be given again",
    )
    report.add_argument("--list", action="store_true", help="print the rules with their sources, and ask nothing")
    report.add_argument(
        "--compare", nargs="+", type=Path, metavar="FILE", help="print reports in JSON side by side, and ask nothing"
    )
    parser.set_defaults(run=_conform)


def _conform(arguments: argparse.Namespace) -> int:
    from handler.conform import report, run

    if arguments.list:
        print(report.rules_table(arguments.profile or PROFILES), end="", flush=True)
        return 0
    if arguments.compare:
        print(report.compare(report.read(arguments.compare)), end="", flush=True)
        return 0
    if not arguments.url:
        raise ConfigError("lmi conform: give the URL of a server, as http://host:port")
    plan = _plan(arguments)
    _check_names(plan)
    results = run.run(plan, _lifetime(arguments), _tell)
    found = report.document(plan, results, arguments.title or arguments.url)
    text = report.markdown(found)
    status = int(any(result.verdict == "failed" for result in results))
    for path in arguments.output:
        status |= _write(path, json.dumps(found, indent=1) + "\n" if path.suffix == ".json" else text)
    print(text, end="", flush=True)
    return status


def _plan(arguments: argparse.Namespace) -> Plan:
    from handler.bench.client import Target
    from handler.config import environment
    from handler.conform.run import Plan
    from handler.conform.server import Asking, Limits

    _ = Target(arguments.url, 0).address  # it may be none
    if arguments.adapter and not all(arguments.adapter.partition("=")[::2]):
        raise ConfigError(f"lmi conform: --adapter {arguments.adapter}: write it as NAME=DIRECTORY")
    asking = Asking(
        arguments.url,
        key=environment.api_key(),
        model=arguments.model,
        adapter=arguments.adapter,
        metrics=arguments.metrics,
        slow=arguments.slow,
        limits=Limits(answer=arguments.timeout),
    )
    profiles = tuple(dict.fromkeys(arguments.profile or ["sagemaker"]))
    return Plan(asking, profiles, arguments.rule, arguments.skip, arguments.ready)


def _check_names(plan: Plan) -> None:
    from handler.conform.rule import RULES
    from handler.conform.run import rules_of

    known = {name for rule in RULES for name in (rule, rule.partition(".")[0])}
    for name in (*plan.only, *plan.left_out):
        if name not in known:
            raise ConfigError(f"lmi conform: there is no rule {name}: lmi conform --list")
    if not rules_of(plan):
        raise ConfigError(f"lmi conform: no such rule is of the profile {', '.join(plan.profiles)}")


def _lifetime(arguments: argparse.Namespace) -> Lifetime | None:
    from handler.conform.process import Command, Container

    if arguments.command:
        return Command(arguments.command)
    return Container(arguments.container) if arguments.container else None


def _tell(result: Result) -> None:
    from handler.conform.report import line

    print(line(result), file=sys.stderr, flush=True)


def _write(path: Path, text: str) -> int:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        print(f"cannot write {path}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _report(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".md", ".json"):
        raise argparse.ArgumentTypeError(f"{text}: must end with .md or .json")
    return path


def _path(text: str) -> str:
    if not text.startswith("/") or not text.isascii() or not text.isprintable() or " " in text:
        raise argparse.ArgumentTypeError(f"{text}: must be a path, as /server/metrics")
    return text


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be a number above 0")
    return value
