"""Runs a replay: sends requests to both sides, compares the responses, and writes the reports."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from handler.core import loop
from handler.core.errors import ConfigError
from proof.bench import machine
from proof.bench.processes import interrupted_by_sigterm
from proof.replay.comparison import Class, traits
from proof.replay.content import has_validator
from proof.replay.exchange import BUSY, Recorded, Request, Response, Unreadable, recorded
from proof.replay.journal import Example, Journal, Progress, outcome
from proof.replay.noise import Ask, Noise
from proof.replay.report import describe, document, page, printable, show
from proof.replay.sources import open_requests
from proof.replay.targets import RECORDED, Paced, open_target

_AHEAD, _AHEAD_BYTES = 64, 8 * 1024 * 1024  # maximum requests, and bytes of their bodies, that are read ahead
_NO_SHADOW = "has no response of the shadow variant, which receives only a share of the requests"
_BEGINNING = 100  # requests that are checked before the run
SHARED_CONTAINER = (
    "lmi replay: a single container of `lmi deploy local --aws` sent the responses of both sides, so they prove "
    "nothing. It serves all endpoints and variants of the emulated account, without their options. Compare servers "
    "that run the options instead: --to 'serve:ARGUMENTS', or the URL of `lmi deploy local SPECIFICATION`"
)


@dataclass(frozen=True)
class Sides:
    """The sides of the comparison. If a side is None, its responses are read from the recording.

    Args:
        target: the new side.
        reference: the old side.
        noise: a server identical to the reference, which receives the repeated requests instead of the reference.
        recorded_by: what sent the recorded responses of the reference and of the target.
    """

    target: Paced | None
    reference: Paced | None = None
    noise: Paced | None = None
    recorded_by: tuple[str, str] = ("", "")

    @property
    def are_queried(self) -> bool:
        """Whether requests are sent to a server. Otherwise, the recording contains the responses of both sides."""
        return any(side is not None for side in (self.target, self.reference, self.noise))


@dataclass(frozen=True)
class ReplayPlan:
    """The settings of a run.

    Args:
        concurrency: the maximum number of concurrent requests.
        speed: the multiple of the recorded pace, or None to send each request once an earlier response is complete.
        greedy: whether to treat all requests as decoded greedily.
        show: whether to retain content in examples.
        expected: the names of findings that do not affect the class.
    """

    concurrency: int = 1
    speed: float | None = None
    greedy: bool = False
    show: bool = False
    expected: frozenset[str] = frozenset()


class Replay:
    """A run of a replay.

    Args:
        advance: a function that is called after each request.
    """

    def __init__(
        self,
        sides: Sides,
        plan: ReplayPlan,
        journal: Journal,
        noise: Noise,
        advance: Callable[[], object] = lambda: None,
    ) -> None:
        self._sides = sides
        self._plan = plan
        self._journal = journal
        self._noise = noise
        self._advance = advance

    async def run(self, requests: Iterator[Request | Unreadable]) -> None:
        feed = _Feed(requests, self._journal)
        pace = _Pace(self._plan.speed) if self._plan.speed is not None else None
        workers = [asyncio.ensure_future(self._work(feed, pace)) for _ in range(self._plan.concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()

    async def _work(self, feed: _Feed, pace: _Pace | None) -> None:
        while (item := await feed.next()) is not None:
            number, request = item
            if pace is not None and request.at is not None:
                await pace.wait(request.at)
            await self._replay_request(number, request)
            self._advance()

    async def _replay_request(self, number: int, request: Request) -> None:
        if reason := self._obstacle(request):
            self._journal.skip(number, Unreadable(printable(request.id), reason))
            return
        both = await self._responses(number, request)
        if both[0].container and both[0].container == both[1].container:
            raise ConfigError(SHARED_CONTAINER)
        self._journal.keep_answered(*(printable(side.by) for side in both))
        real = await self._noise.real(request, traits(request, self._plan.greedy), *both, *self._again(*both))
        self._journal.keep_volatile(self._noise.learnt)
        changes = [item._replace(cls=Class.EQUAL) if item.name in self._plan.expected else item for item in real]
        result = outcome(number, changes, *both)
        example = Example(request, *both, changes)
        if self._journal.summary.wants_example(result.cls, example.size):
            self._journal.keep_example(result.cls, describe(example, result.cls, self._plan.show))
        self._journal.add(result)

    def _obstacle(self, request: Request) -> str:
        """Return the reason why a request cannot be compared, or ""."""
        sides = self._sides
        for side, response, missing in (
            (sides.reference, request.response, "has no recorded response"),
            (sides.target, request.other, _NO_SHADOW),
        ):
            if side is None and response is None:
                return missing
            if side is None and response is not None and response.status in BUSY:
                return f"got {response.status} from a busy server when it was recorded"
        return request.unsendable if sides.are_queried else ""

    async def _responses(self, number: int, request: Request) -> tuple[Response, Response]:
        """Return the responses of both sides.

        At a recorded pace, requests are sent to both sides concurrently. Otherwise, they are sent to one side after the
        other, in alternating order.
        """

        by = self._sides.recorded_by
        reference = partial(_ask, self._sides.reference, request, request.response, by[0])
        target = partial(_ask, self._sides.target, request, request.other, by[1])
        if self._plan.speed is not None:
            both = await asyncio.gather(reference(), target())
            return both[0], both[1]
        if number % 2:
            response = await target()
            return await reference(), response
        response = await reference()
        return response, await target()

    def _again(self, reference: Response, target: Response) -> tuple[Ask | None, Response]:
        """Return a function that repeats a request, or None if there is no server, and the response to compare with."""
        sides = self._sides
        if (side := sides.noise or sides.reference) is not None:
            return side.ask, reference
        if sides.target is not None:
            return sides.target.ask, target
        return None, reference


async def _ask(side: Paced | None, request: Request, response: Recorded | None, by: str) -> Response:
    if side is not None:
        return await side.ask(request)
    assert response is not None  # otherwise the request was skipped
    return recorded(response)._replace(by=by)


class _Feed:
    """The remaining requests with their indexes, which a thread reads in small groups."""

    def __init__(self, requests: Iterator[Request | Unreadable], journal: Journal) -> None:
        self._items = enumerate(requests)
        self._journal = journal
        self._read: list[tuple[int, Request]] = []
        self._lock = asyncio.Lock()
        self._ended = False

    async def next(self) -> tuple[int, Request] | None:
        if not self._read:
            async with self._lock:
                while not self._read and not self._ended:
                    for number, item in await asyncio.to_thread(self._take):
                        if isinstance(item, Unreadable):
                            self._journal.skip(number, Unreadable(printable(item.location), printable(item.reason)))
                        else:
                            self._read.append((number, item))
                    self._read.reverse()
        return self._read.pop() if self._read else None

    def _take(self) -> list[tuple[int, Request | Unreadable]]:
        taken: list[tuple[int, Request | Unreadable]] = []
        size = 0
        for number, item in self._items:
            if not self._journal.has(number):
                taken.append((number, item))
                size += len(item.body) if isinstance(item, Request) else 0
            if len(taken) >= _AHEAD or size >= _AHEAD_BYTES:
                return taken
        self._ended = True
        return taken


class _Pace:
    """The pace of a recording: `wait` returns when a request is due, relative to the first request."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._zero: tuple[float, float] | None = None

    async def wait(self, at: float) -> None:
        now = time.monotonic()
        if self._zero is None:
            self._zero = at, now
        recorded_at, began = self._zero
        await asyncio.sleep(max(0.0, began + (at - recorded_at) / self._speed - now))


def beginning(
    requests: Iterator[Request | Unreadable],
) -> tuple[list[Request | Unreadable], Iterator[Request | Unreadable]]:
    """Return the first items of a recording, and an iterator over the whole recording."""
    read: list[Request | Unreadable] = []
    size = 0
    for item in itertools.islice(requests, _BEGINNING):
        read.append(item)
        size += len(item.body) if isinstance(item, Request) else 0
        if size >= _AHEAD_BYTES:
            break
    return read, itertools.chain(read, requests)


# -- run `lmi replay`, and write its reports ---------------------------------------------------------------------------


_AT_RECORDED_PACE = 256
_INTERRUPTED = 130


def run(arguments: argparse.Namespace) -> int:
    """Run `lmi replay`, and return its exit status."""
    recording = open_requests(arguments.requests)
    read, requests = beginning(recording)
    _check(arguments, read)
    arguments.recorded_by = recording.by
    description = _description(arguments)
    with contextlib.closing(Journal(arguments.output, description, restart=arguments.restart)) as journal:
        return _replay(arguments, description, requests, journal)


def _replay(arguments: argparse.Namespace, description: dict[str, Any], requests: Any, journal: Journal) -> int:
    if journal.num_done:
        print(f"lmi replay: continuing after {journal.num_done:,} requests in {arguments.output}", file=sys.stderr)
    if not has_validator():
        print(
            "lmi replay: jsonschema is not installed (pip install jsonschema); responses are checked for JSON only",
            file=sys.stderr,
        )
    noise, progress = Noise(arguments.near), Progress(journal)
    try:
        with interrupted_by_sigterm():
            loop.run(_run(arguments, requests, journal, noise, progress))
    except KeyboardInterrupt:
        progress.close()
        print("lmi replay: stopped; run the same command again to continue", file=sys.stderr)
        return _INTERRUPTED
    progress.close()
    status = _report(arguments, description, journal, noise)
    journal.finish()
    return status


def readable(name: str, items: Sequence[Request | Unreadable], command: str = "lmi replay") -> list[Request]:
    """Return the requests among the first items of a recording. Raise ConfigError if there are none."""
    read = [item for item in items if isinstance(item, Request)]
    if not read:
        first = next((item for item in items if isinstance(item, Unreadable)), None)
        reason = "" if first is None else printable(f": {first.location}: {first.reason}")
        raise ConfigError(f"{command}: {name}: none of its first requests can be read{reason}")
    return read


def _check(arguments: argparse.Namespace, items: Sequence[Request | Unreadable]) -> None:
    """Raise ConfigError if the first requests in the recording lack responses or times that the arguments require."""
    read = readable(arguments.requests, items)
    if arguments.to == RECORDED and all(request.other is None for request in read):
        raise ConfigError("lmi replay: --to recorded: the recording has no responses of a shadow variant")
    if arguments.recorded_pace and all(request.at is None for request in read):
        raise ConfigError("lmi replay: --recorded-pace: the recording has no times")
    if arguments.against == RECORDED and all(request.response is None for request in read):
        raise ConfigError("lmi replay: the recording has no responses; name a server with --against")
    if arguments.noise == RECORDED:
        raise ConfigError("lmi replay: --noise recorded: requests cannot be sent to a recording")


async def _run(
    arguments: argparse.Namespace, requests: Any, journal: Journal, noise: Noise, progress: Progress
) -> None:
    concurrency = arguments.concurrency or (_AT_RECORDED_PACE if arguments.recorded_pace else 1)
    with contextlib.ExitStack() as stack:
        target, reference, noise_target = (
            open_target(name, key, arguments.timeout, arguments.patience, concurrency, stack)
            if name is not None
            else None
            for name, key in (
                (arguments.to, arguments.key_to),
                (arguments.against, arguments.key_against),
                (arguments.noise, arguments.key_noise),
            )
        )
        sides = Sides(target, reference, noise_target, arguments.recorded_by)
        plan = ReplayPlan(
            concurrency, arguments.recorded_pace, arguments.greedy, arguments.show, frozenset(arguments.expect)
        )
        opened = [side for side in (sides.target, sides.reference, sides.noise) if side is not None]
        try:
            for side in opened:
                await side.open()
            await Replay(sides, plan, journal, noise, progress.advance).run(requests)
        finally:
            for side in opened:
                await side.close()


def _description(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that must match for a run to be continued."""
    names = ("requests", "to", "against", "noise", "near", "greedy", "show", "expect")
    return {name: _text(getattr(arguments, name)) for name in names}


def _text(value: Any) -> Any:
    """Return an argument as text that can be encoded in UTF-8. Other bytes in file names are replaced."""
    return os.fsencode(value).decode("utf-8", "replace") if isinstance(value, str) else value


def _report(arguments: argparse.Namespace, description: dict[str, Any], journal: Journal, noise: Noise) -> int:
    allowed = {Class.TIE: 100.0, **{Class(name): percent for name, percent in arguments.allow}}
    report = document(description, journal.summary, noise, allowed)
    print(show(report))
    files = {"report.json": json.dumps({**report, **machine.describe()}, indent=1) + "\n", "report.html": page(report)}
    for name, text in files.items():
        try:
            (arguments.output / name).write_text(text, "utf-8")
        except OSError as error:
            raise ConfigError(f"lmi replay: --output {arguments.output}: {name}: {error.strerror}") from None
    print(f"\nwritten: {', '.join(str(arguments.output / name) for name in files)}")
    if report["beyond"]:
        print(f"classes with more requests than --allow permits: {', '.join(report['beyond'])}")
    if not report["compared"]:
        print("no request was compared")
    return int(bool(report["beyond"]) or not report["compared"])
