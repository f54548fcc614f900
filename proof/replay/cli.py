"""Command line of `lmi replay`. The replay code is imported only when it runs, so that `lmi serve` starts quickly."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

from handler.core.command_line import KeptLines, add_repeatable, positive
from handler.core.numbers import decimal, is_digits

_OUTPUT = Path("lmi-replay")
_DESCRIPTION = """Send recorded requests to a server, and compare its responses with another server's, or with the \
recording. Each request gets a class: equal, tie (near ties of log-probabilities, nearly equal numbers), unknown \
(nothing could be compared), text, shape (fields and types), framing, status, lost. Volatile values, such as IDs, are \
detected by repeating requests.

TARGET is http://HOST:PORT, sagemaker:NAME[/COMPONENT], recorded, or serve:ARGUMENTS, which starts `lmi serve` with \
these arguments and stops it at the end. Messages that came over WebSockets were recorded as requests, and are sent \
over HTTP. Exit status: 1 if a class has more requests than --allow permits, or if no request was compared. Bodies \
are not printed without --show. To continue a killed run, run the same command again."""


def add_parser(commands: Any) -> None:
    """Add the subcommand `replay` to `lmi`."""
    parser = commands.add_parser(
        "replay",
        help="send recorded requests to two servers, and compare their responses",
        formatter_class=KeptLines,
        description=_DESCRIPTION,
    )
    parser.add_argument(
        "requests",
        metavar="REQUESTS",
        help="a file, a directory or s3://BUCKET/PREFIX/: SageMaker's data capture, OpenAI's batch files, HAR, "
        "lines of {path, headers, body}, or bodies alone",
    )
    parser.add_argument("--to", type=_target, required=True, metavar="TARGET", help="the server under test")
    parser.add_argument(
        "--against", type=_target, default="recorded", metavar="TARGET", help="the reference (default: %(default)s)"
    )
    parser.add_argument(
        "--noise",
        type=_target,
        metavar="TARGET",
        help="the server that receives repeated requests instead of the reference, such as an identical server",
    )
    for side in ("to", "against", "noise"):
        parser.add_argument(
            f"--key-{side}",
            metavar="VARIABLE",
            help=f"the environment variable that contains the key of --{side}'s server",
        )
    pace = parser.add_argument_group("pace")
    pace.add_argument(
        "--concurrency",
        type=_count,
        metavar="N",
        help="maximum requests in flight (default: 1, or 256 with --recorded-pace)",
    )
    pace.add_argument(
        "--recorded-pace",
        nargs="?",
        type=positive,
        const=1.0,
        metavar="FACTOR",
        help="send at the recorded times, or FACTOR times faster",
    )
    pace.add_argument(
        "--timeout",
        type=positive,
        default=600.0,
        metavar="S",
        help="maximum seconds for one response (default: %(default)s)",
    )
    pace.add_argument(
        "--patience",
        type=positive,
        default=120.0,
        metavar="S",
        help="maximum seconds to retry a request while the server is busy: 429, 503, throttled (default: %(default)s)",
    )
    compare = parser.add_argument_group("comparison")
    compare.add_argument(
        "--near",
        type=positive,
        default=0.25,
        metavar="LOGPROB",
        help="maximum difference between log-probabilities that count as nearly equal (default: %(default)s)",
    )
    compare.add_argument("--greedy", action="store_true", help="treat all requests as greedy, and compare all texts")
    help_text = (
        "a known difference, by its name in the report, such as 'value $.system_fingerprint'; it is counted, but does "
        "not affect the class"
    )
    add_repeatable(compare, "--expect", "expect", "DIFFERENCE", help_text)
    compare.add_argument(
        "--allow",
        type=_allowance,
        action="append",
        default=[],
        metavar="CLASS=PERCENT",
        help="maximum percentage of requests in a class; repeatable (default: tie=100, others 0)",
    )
    report = parser.add_argument_group("report")
    report.add_argument(
        "--output",
        type=Path,
        default=_OUTPUT,
        metavar="DIRECTORY",
        help="directory for the journal, report.json and report.html (default: %(default)s)",
    )
    report.add_argument("--restart", action="store_true", help="discard an earlier run in the --output directory")
    report.add_argument("--show", action="store_true", help="show requests and responses in the examples")
    parser.set_defaults(run=_replay)


def _replay(arguments: argparse.Namespace) -> int:
    from proof.replay.run import run

    return run(arguments)


def _target(text: str) -> str:
    from proof.replay.targets import check_name

    try:
        return check_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _allowance(text: str) -> tuple[str, float]:
    from proof.replay.comparison import CLASSES

    name, _, percent = text.partition("=")
    names = [cls.value for cls in CLASSES[1:]]
    with contextlib.suppress(ValueError):
        if name in names and 0 <= (value := decimal(percent)) <= 100:
            return name, value
    raise argparse.ArgumentTypeError(f"{text}: must be CLASS=PERCENT, where CLASS is {', '.join(names)}")


def _count(text: str) -> int:
    if not is_digits(text) or not 1 <= int(text) <= 10_000:
        raise argparse.ArgumentTypeError("must be a whole number from 1 to 10000")
    return int(text)
