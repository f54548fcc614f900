"""`make accept-aws SPEC=FILE`: a real endpoint from its making to its end, point by point; a JSON verdict last.

LMI_ACCEPT_AWS=yes python -m tests.accept.aws FILE [--set KEY=VALUE ...]

It costs money: instances run for the time it takes (half an hour or more). Whatever happens, it ends in `down`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from deploy.errors import DeployError
from deploy.spec import Spec
from deploy.spec.reading import read_spec

ALLOWED = "LMI_ACCEPT_AWS"
PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"
_NOT_THERE = 4  # exit status of `status`
_PROMPT = "Count from one to ten:"
_TOKENS = ("-p", "max_new_tokens=32")


class Ran(NamedTuple):
    """A command's exit status, what it printed, and the seconds that it took."""

    status: int
    output: str
    seconds: float


class Result(NamedTuple):
    """A point's. `why`: of a failure, its end; of what was skipped, the reason."""

    point: str
    verdict: str
    seconds: float
    why: str = ""


class Point(NamedTuple):
    """Something that must work: a command, and what its output must be to pass."""

    name: str
    command: list[str]
    wanted: Callable[[str], bool] = lambda output: True


Run = Callable[[Sequence[str]], Ran]


def run(command: Sequence[str]) -> Ran:
    """`lmi deploy COMMAND`, its progress shown as it comes, its answer kept."""
    began = time.monotonic()
    print(f"$ lmi deploy {' '.join(command)}", flush=True)
    lines = []
    with subprocess.Popen(
        [sys.executable, "-m", "deploy", *command], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"  {line}", end="", flush=True)
            lines.append(line)
    return Ran(process.returncode, "".join(lines), time.monotonic() - began)


def points(spec: Spec, given: Sequence[str]) -> list[Point | Result]:
    """All of them in order; a `Result` is one that this specification cannot have.

    Args:
        given: the specification as a command takes it: file and settings.
    """
    name, region = spec.name, [] if spec.region is None else ["--region", spec.region]
    component = ["--component", spec.components[0].name] if spec.components else []
    which = [*region, *component]  # after the positionals: argparse takes an optional one only where it expects it
    message = json.dumps({"messages": [{"role": "user", "content": _PROMPT}], "max_tokens": 32})
    answers: list[Point] = [
        Point("status: it serves", ["status", name, *region]),
        Point("invoke", ["invoke", name, _PROMPT, *_TOKENS, *which], _is_text),
        Point(
            "invoke: a chat", ["invoke", name, message, *which], lambda output: "choices" in output or _is_text(output)
        ),
        Point("stream", ["stream", name, _PROMPT, *_TOKENS, *which], _is_text),
        Point("logs", ["logs", name, *region, "--since", "1h"], _is_text),
    ]
    if spec.asynchronous is not None:
        answers = [answers[0], answers[-1]]
    changed = [*given, "--set", f"environment.LMI_ACCEPT={int(time.time())}"]
    return [
        Point("doctor", ["doctor", *given]),
        Point("plan", ["plan", *given], lambda output: name in output),
        Point("up", ["up", *given, "--yes"]),
        Point("up again changes nothing", ["up", *given, "--yes"], lambda output: "nothing to do" in output),
        *answers,
        *_scaling(spec, which),
        Point("update", ["update", *changed, "--yes"]),
        *(point for point in answers if point.name in ("invoke", "stream")),
    ]


def _scaling(spec: Spec, where: list[str]) -> list[Point | Result]:
    if spec.scaling is not None:
        more = str(spec.scaling.max + 1)
        return [
            Point("scale: bounds", ["scale", spec.name, *where, "--max", more]),
            Point("scale: bounds back", ["scale", spec.name, *where, "--max", str(spec.scaling.max)]),
        ]
    if spec.components:
        count = spec.components[0].copies
        managed = spec.instance.managed
        if managed is None or managed.max <= spec.instance.count:
            return [Result("scale", SKIP, 0, "no room for another copy: set instance.managed.max")]
    else:
        count = spec.instance.count
    return [
        Point("scale up", ["scale", spec.name, str(count + 1), *where]),
        Point("scale back", ["scale", spec.name, str(count), *where]),
    ]


def accept(spec: Spec, given: Sequence[str], run: Run) -> list[Result]:
    """Every point, then `down`, whatever came before. After the first failure of `up` nothing else is tried.

    Raises:
        DeployError: the endpoint exists, and would be gone afterwards.
    """
    region = [] if spec.region is None else ["--region", spec.region]
    if run(["status", spec.name, *region]).status != _NOT_THERE:
        raise DeployError(f"there is an endpoint {spec.name}, or AWS cannot be asked", "Take another --set name=...")
    results: list[Result] = []
    try:
        for point in points(spec, given):
            result = point if isinstance(point, Result) else _tried(point, run)
            results.append(result)
            _say(result)
            if result.verdict == FAIL and result.point in ("doctor", "plan", "up"):
                break
    finally:
        with _undisturbed():
            for point in _ending(spec, given, region):
                results.append(_tried(point, run))
                _say(results[-1])
    return results


def _ending(spec: Spec, given: Sequence[str], region: Sequence[str]) -> list[Point]:
    # the file alone: `down` takes no settings, and the name may be one of them
    data = ["--data"] if spec.model.upload is not None and "--set" not in given else []
    file = [given[0]] if data else ["--name", spec.name]
    return [
        Point("down", ["down", *file, *region, "--yes", "--logs", *data]),
        Point("gone", ["status", spec.name, *region]),
    ]


def _tried(point: Point, run: Run) -> Result:
    ran = run(point.command)
    wanted = _NOT_THERE if point.name == "gone" else 0
    if ran.status != wanted:
        return Result(point.name, FAIL, ran.seconds, f"exit status {ran.status}, not {wanted}")
    if not point.wanted(ran.output):
        return Result(point.name, FAIL, ran.seconds, f"its output is not what it should be: {ran.output[-200:]!r}")
    return Result(point.name, PASS, ran.seconds)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C does not keep `down` from being done."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def verdict(results: Sequence[Result]) -> str:
    return FAIL if any(result.verdict == FAIL for result in results) else PASS


def main(argv: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ, run: Run = run) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.accept.aws", description=__doc__)
    parser.add_argument("spec", type=Path, metavar="FILE")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args(argv)
    if environment.get(ALLOWED) != "yes":
        print(
            f"this makes an endpoint in your AWS account, which costs money: {ALLOWED}=yes allows it", file=sys.stderr
        )
        return 2
    given = [str(arguments.spec), *(word for setting in arguments.settings for word in ("--set", setting))]
    try:
        results = accept(read_spec(arguments.spec, arguments.settings), given, run)
    except DeployError as error:
        print(f"{error}\n{error.advice}", file=sys.stderr)
        return error.status
    print(json.dumps({"verdict": verdict(results), "points": [result._asdict() for result in results]}))
    return 0 if verdict(results) == PASS else 1


def _is_text(output: str) -> bool:
    return bool(output.strip())


def _say(result: Result) -> None:
    print(f"{result.verdict} {result.point} ({result.seconds:.0f} s) {result.why}".rstrip(), flush=True)


def _interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupted)  # the same as Ctrl-C: `down` comes first
    raise SystemExit(main())
