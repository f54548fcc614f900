"""Command line of `lmi conform`. The rules are imported only when it runs, so that `lmi serve` starts quickly."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from handler.core.command_line import KeptLines, add_repeatable, positive
from handler.core.errors import ConfigError
from proof.conform.dialects import PROFILES

if TYPE_CHECKING:
    from proof.conform.run import ConformPlan, Result
    from proof.conform.server import Lifetime

_DESCRIPTION = """\
Test a server against the public contracts of SageMaker and of the APIs that you name. The report \
shows the request and the response of each failed rule. A rule that was skipped, timed out or could \
not run is reported as "not asked", with the reason. Results go to standard error, and a report in \
Markdown to standard output at the end. LMI_API_KEY is the server's key. Exit status: 0 if no rule failed, 1 if a rule \
failed or a file could not be written, 2 if nothing could run."""
_EXAMPLE = """examples:
  lmi conform http://127.0.0.1:8080
  lmi conform http://127.0.0.1:8080 --profile sagemaker --profile lmi-0.38 --output report.md
  lmi conform http://127.0.0.1:8080 --command 'docker run --rm -p 8080:8080 IMAGE serve'
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand `conform` to `lmi`."""
    parser = commands.add_parser(
        "conform",
        help="test a server against the contracts of SageMaker, LMI and others",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=KeptLines,
    )
    parser.add_argument("url", nargs="?", help="the URL of the server, such as http://host:port")
    parser.add_argument(
        "--profile",
        action="append",
        choices=PROFILES,
        metavar="NAME",
        help="a contract to test: sagemaker (the platform), or an API: lmi-0.28, lmi-0.38, tgi, openai, anthropic, "
        "triton, decisions, websockets; repeatable (default: sagemaker)",
    )
    parser.add_argument(
        "--model", default="", metavar="NAME", help="the model in requests (default: the first that the server lists)"
    )
    parser.add_argument(
        "--adapter",
        default="",
        metavar="NAME=DIRECTORY",
        help="a LoRA adapter and its directory on the server, for the rules about adapters",
    )
    parser.add_argument(
        "--metrics",
        type=_path,
        default="/metrics",
        metavar="PATH",
        help="the path of the server's metrics, as in SageMaker's MetricsEndpointPath (default: %(default)s)",
    )
    end = parser.add_mutually_exclusive_group()
    end.add_argument(
        "--command",
        metavar="COMMAND",
        help="command that starts the server at URL and that exits on SIGTERM; the rules about start and stop need it",
    )
    end.add_argument(
        "--container",
        metavar="NAME",
        help="running container of the server at URL (docker or podman); the rules about shutdown send it SIGTERM",
    )
    parser.add_argument(
        "--ready",
        type=positive,
        default=600.0,
        metavar="S",
        help="maximum seconds until /ping returns 200 (default: %(default)g)",
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        default=60.0,
        metavar="S",
        help="maximum seconds for one response (default: %(default)g)",
    )
    parser.add_argument("--slow", action="store_true", help="also run rules that take minutes")
    add_repeatable(parser, "--rule", "rule", "RULE", "run only this rule (stream.chunked) or group (stream)")
    add_repeatable(parser, "--skip", "skip", "RULE", "skip this rule or group")
    report = parser.add_argument_group("report")
    report.add_argument("--title", metavar="TEXT", help="the server's name in the report (default: its URL)")
    report.add_argument(
        "--output",
        type=_report,
        action="append",
        default=[],
        metavar="FILE",
        help="save the report, as .md or .json; repeatable",
    )
    report.add_argument("--list", action="store_true", help="print the rules with their sources, and run none")
    report.add_argument(
        "--compare", nargs="+", type=Path, metavar="FILE", help="print saved JSON reports side by side, and run no rule"
    )
    parser.set_defaults(run=_conform)


def _conform(arguments: argparse.Namespace) -> int:
    from proof.conform import report, run

    if arguments.list:
        print(report.rules_table(arguments.profile or PROFILES), end="", flush=True)
        return 0
    if arguments.compare:
        print(report.compare(report.read(arguments.compare)), end="", flush=True)
        return 0
    if not arguments.url:
        raise ConfigError("lmi conform: give the URL of a server, such as http://host:port")
    from proof.bench.processes import interrupted_by_sigterm

    plan = _plan(arguments)
    _check_names(plan)
    results: list[Result] = []
    text, unwritten = "", set[Path]()
    files = [path for path in arguments.output if _is_replaceable(path)]

    def write(paths: Iterable[Path]) -> None:
        nonlocal text
        content = report.document(plan, results, arguments.title or arguments.url)
        text = report.markdown(content)
        for path in paths:
            if path not in unwritten and _write(
                path, json.dumps(content, indent=1) + "\n" if path.suffix == ".json" else text
            ):
                unwritten.add(path)

    def tell(result: Result) -> None:
        """Show a result, and write the reports so far, because a run may end early."""
        _tell(result)
        results.append(result)
        write(files)

    try:
        with interrupted_by_sigterm():
            run.run(plan, _lifetime(arguments), tell)
    finally:
        if results:
            write(path for path in arguments.output if path not in files)
    print(report.total(results), *report.origin_lines(plan), sep="\n", file=sys.stderr, flush=True)
    print(text, end="", flush=True)
    verdicts = {result.verdict for result in results}
    return 1 if unwritten or "failed" in verdicts else 2 if verdicts == {"not asked"} else 0


def _plan(arguments: argparse.Namespace) -> ConformPlan:
    from handler.config import environment
    from proof.bench.client import Target
    from proof.conform.run import ConformPlan
    from proof.conform.server import Asking, Limits

    _ = Target(arguments.url, 0).address  # raises ConfigError for an invalid URL
    if arguments.adapter and not all(arguments.adapter.partition("=")[::2]):
        raise ConfigError(f"lmi conform: --adapter {arguments.adapter}: write it as NAME=DIRECTORY")
    asking = Asking(
        arguments.url,
        key=environment.api_key(),
        model=arguments.model,
        adapter=arguments.adapter,
        metrics=arguments.metrics,
        slow=arguments.slow,
        limits=Limits(response=arguments.timeout),
    )
    profiles = tuple(dict.fromkeys(arguments.profile or ["sagemaker"]))
    return ConformPlan(asking, profiles, arguments.rule, arguments.skip, arguments.ready)


def _check_names(plan: ConformPlan) -> None:
    from proof.conform.rule import RULES
    from proof.conform.run import rules_of, selects

    rule_names = {name for rule in RULES for name in (rule, rule.partition(".")[0])}
    for name in (*plan.only, *plan.left_out):
        if name not in rule_names:
            raise ConfigError(f"lmi conform: there is no rule or group {name}; lmi conform --list shows all")
    if not rules_of(plan):
        profiles = {profile for rule in RULES.values() if selects(rule, plan.only) for profile in rule.profiles}
        expected = " or ".join(name for name in PROFILES if name in profiles)
        raise ConfigError(f"lmi conform: {', '.join(plan.only)}: needs --profile {expected}")


def _lifetime(arguments: argparse.Namespace) -> Lifetime | None:
    from proof.conform.server import Command, ContainerRun

    if arguments.command:
        return Command(arguments.command)
    return ContainerRun(arguments.container) if arguments.container else None


def _tell(result: Result) -> None:
    from proof.conform.report import line

    print(line(result), file=sys.stderr, flush=True)


def _is_replaceable(path: Path) -> bool:
    """Return whether a path is a regular file or does not exist. Links, pipes and devices must not be replaced."""
    return not path.is_symlink() and (path.is_file() or not path.exists())


def _write(path: Path, text: str) -> int:
    """Write a file, and return 1 if this fails, otherwise 0."""
    try:
        if not _is_replaceable(path) or not _replace(path, text):
            path.write_text(text, "utf-8")
    except OSError as error:
        print(f"cannot write {path}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _replace(path: Path, text: str) -> bool:
    """Replace a file atomically, and return whether its directory and mount allow that.

    Raises:
        OSError: the disk is full. The file is unchanged.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text, "utf-8")
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        return False
    return True


def _report(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".md", ".json"):
        raise argparse.ArgumentTypeError(f"{text}: must end with .md or .json")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no directory {path.parent}")
    return path


def _path(text: str) -> str:
    if not text.startswith("/") or not text.isascii() or not text.isprintable() or " " in text:
        raise argparse.ArgumentTypeError(f"{text}: must be a path, such as /server/metrics")
    return text
