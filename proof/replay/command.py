"""Run `lmi replay`, and write its reports."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from handler.core import loop
from handler.core.errors import ConfigError
from proof.bench import machine
from proof.replay.content import has_validator
from proof.replay.exchange import Request
from proof.replay.findings import Class
from proof.replay.journal import Journal, Progress
from proof.replay.noise import Noise
from proof.replay.report import document, page, show
from proof.replay.run import Plan, Replay, Sides, beginning
from proof.replay.sources import open_requests
from proof.replay.targets import RECORDED, open_target

_AT_RECORDED_PACE = 256
_INTERRUPTED = 130


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    read, requests = beginning(open_requests(arguments.requests))
    _check(arguments, read)
    what = _what(arguments)
    with contextlib.closing(Journal(arguments.output, what, restart=arguments.restart)) as journal:
        return _replay(arguments, what, requests, journal)


def _replay(arguments: argparse.Namespace, what: dict[str, Any], requests: Any, journal: Journal) -> int:
    if journal.num_done:
        print(f"lmi replay: continuing after {journal.num_done:,} requests in {arguments.output}", file=sys.stderr)
    if not has_validator():
        print(
            "lmi replay: jsonschema is not installed (pip install jsonschema); answers are checked for JSON only",
            file=sys.stderr,
        )
    noise, progress = Noise(arguments.near), Progress(journal)
    try:
        with _interrupted_by_sigterm():
            loop.run(_run(arguments, requests, journal, noise, progress))
    except KeyboardInterrupt:
        progress.close()
        print("lmi replay: stopped; give the same command again to continue", file=sys.stderr)
        return _INTERRUPTED
    progress.close()
    status = _report(arguments, what, journal, noise)
    journal.finish()
    return status


def _check(arguments: argparse.Namespace, read: Sequence[Request]) -> None:
    """Raise ConfigError if the beginning of the recording lacks what the arguments need."""
    if not read:
        raise ConfigError(f"lmi replay: {arguments.requests}: no request can be read at its beginning")
    if arguments.to == RECORDED and all(one.other is None for one in read):
        raise ConfigError("lmi replay: --to recorded: the recording has no answers of a shadow variant")
    if arguments.recorded_pace and all(one.at is None for one in read):
        raise ConfigError("lmi replay: --recorded-pace: the recording has no times")
    if arguments.against == RECORDED and all(one.answer is None for one in read):
        raise ConfigError("lmi replay: the recording has no answers; name a server with --against")
    if arguments.noise == RECORDED:
        raise ConfigError("lmi replay: --noise recorded: a recording cannot be asked again")


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """End as by Ctrl-C, which stops the servers that were started."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


async def _run(
    arguments: argparse.Namespace, requests: Any, journal: Journal, noise: Noise, progress: Progress
) -> None:
    concurrency = arguments.concurrency or (_AT_RECORDED_PACE if arguments.recorded_pace else 1)
    with contextlib.ExitStack() as stack:
        sides = Sides(
            *(
                open_target(name, key, arguments.timeout, arguments.patience, concurrency, stack)
                if name is not None
                else None
                for name, key in (
                    (arguments.to, arguments.key_to),
                    (arguments.against, arguments.key_against),
                    (arguments.noise, arguments.key_noise),
                )
            )
        )
        plan = Plan(concurrency, arguments.recorded_pace, arguments.greedy, arguments.show, frozenset(arguments.expect))
        opened = [side for side in (sides.target, sides.reference, sides.noise) if side is not None]
        try:
            for side in opened:
                await side.open()
            await Replay(sides, plan, journal, noise, progress.advance).run(requests)
        finally:
            for side in opened:
                await side.close()


def _what(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what must be the same for a run to go on."""
    names = ("requests", "to", "against", "noise", "near", "greedy", "show", "expect")
    return {name: _text(getattr(arguments, name)) for name in names}


def _text(value: Any) -> Any:
    """Return an argument as UTF-8 can write it: a file's name may be of other bytes."""
    return os.fsencode(value).decode("utf-8", "replace") if isinstance(value, str) else value


def _report(arguments: argparse.Namespace, what: dict[str, Any], journal: Journal, noise: Noise) -> int:
    allowed = {Class.TIE: 100.0, **{Class(name): percent for name, percent in arguments.allow}}
    report = document(what, journal.summary, noise, allowed)
    print(show(report))
    files = {"report.json": json.dumps({**report, **machine.describe()}, indent=1) + "\n", "report.html": page(report)}
    for name, text in files.items():
        try:
            (arguments.output / name).write_text(text, "utf-8")
        except OSError as error:
            raise ConfigError(f"lmi replay: --output {arguments.output}: {name}: {error.strerror}") from None
    print(f"\nwritten: {', '.join(str(arguments.output / name) for name in files)}")
    if report["beyond"]:
        print(f"more than --allow permits: {', '.join(report['beyond'])}")
    if not report["compared"]:
        print("no request was compared")
    return int(bool(report["beyond"]) or not report["compared"])
