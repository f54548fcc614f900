"""Change `handler/` in places drawn at random, one at a time, and count the changes that tests notice.

    python -m tests.tools.mutate [--commit REV] [--among REV] [--number 300] [--seed 1] [--at handler/djl ...]
        [--tests tests/unit tests/app]

The same seed draws the same places from the same source, so a pruning of tests can be compared with the commit before.
Where the source has changed as well, `--among` draws from what both commits have: two runs, each among the other's.
All runs are in a clone of the commit, in a temporary directory. Its source has each change beside what it replaces,
and a number chooses one; so the tests are collected once, and each change is tried in a fork. First, all tests run
without a change, which records the places that each executes. Each change is then held against the tests that execute
its place. It is caught when one fails, or when they take far longer than before. A place that no test executes is not
caught. What a module does when it is imported is held against the tests that execute its functions, in a new process.
There the same tests must pass without the change, in the same order; where they fail too, nothing is caught.

Neither mutmut nor Cosmic Ray: the first swaps whole functions within one process, which engines' processes do not see,
and changes all places; the second runs all tests for each change.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.BitOr: ast.BitAnd,
}  # fmt: skip
ROOT = Path(__file__).parents[2]
QUICK = "not model and not clients and not djl and not vllm"
"""The tests of `make test`."""
_PYTEST = ("-q", "-n", "0", "-p", "no:cacheprovider")
_PLAN = "MUTATE"
"""The environment variable that names the plugin's `Plan`."""
_CHOSEN = "MUTANT"
"""The environment variable with the number of the change, which servers that a test starts read too."""
SWITCH = f"""import os

chosen = int(os.environ.get("{_CHOSEN}", -1))
executed = set()

def on(number):
    executed.add(number)
    return number == chosen
"""
"""The clone's module `mutated`."""


class Place(NamedTuple):
    """A change: bytes `begin` to `end` of the file become `text`.

    Attributes:
        line: the first one of the simple statement around it.
        is_statement: the change is one of a whole statement.
        outside: the place is outside of functions: the module executes it when it is imported.
    """

    path: str
    line: int
    begin: int
    end: int
    text: str
    is_statement: bool = False
    outside: bool = False


class Recorded(NamedTuple):
    """One test: whether it passed, its seconds, and the numbers of the places that it executes."""

    passed: bool
    seconds: float
    numbers: list[int]


class Plan(NamedTuple):
    """What the plugin does.

    Attributes:
        places: as they are printed.
        modules: for each place, the number that any function of its module has.
        outside: for each place, whether it is outside of functions.
        budget: seconds of tests for each change.
        recorded: the file of the record, which is read where it exists, else written.
    """

    places: list[str]
    modules: list[int]
    outside: list[bool]
    budget: float
    recorded: str


def places(path: str, source: str) -> Iterator[Place]:
    """Yield the changes of one file, in order."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for statement, node, outside in _nodes(ast.parse(source).body):
        at: Any = node
        for text in _changes(node):
            begin, end = starts[at.lineno - 1] + at.col_offset, starts[at.end_lineno - 1] + at.end_col_offset
            first = at.lineno if hasattr(statement, "body") else statement.lineno
            yield Place(path, first, begin, end, text, isinstance(node, ast.stmt), outside)


def _nodes(body: Sequence[ast.stmt], outside: bool = True) -> Iterator[tuple[ast.stmt, ast.AST, bool]]:
    """Yield the nodes that a change may be made of, each with its statement, and whether that is outside of functions;
    no docstrings and no annotations.
    """
    for statement in body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            continue
        yield statement, statement, outside
        inner = outside and not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
        for name, value in ast.iter_fields(statement):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.expr | ast.arguments | ast.withitem) and name not in ("annotation", "returns"):
                    yield from ((statement, node, outside) for node in _expressions(child))
                elif isinstance(child, ast.stmt):
                    yield from _nodes([child], inner)
                elif isinstance(child, ast.ExceptHandler | ast.match_case):
                    yield from _nodes(child.body, inner)


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if isinstance(node, ast.JoinedStr):  # before Python 3.12 its parts have no places of their own
        return
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.arg):
            yield from _expressions(child)


def _changes(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Compare | ast.BoolOp | ast.BinOp):
        operator = node.ops[0] if isinstance(node, ast.Compare) else node.op
        if type(operator) in _SWAPS:
            swapped: Any = _SWAPS[type(operator)]()
            changed = _copy(node)
            if isinstance(changed, ast.Compare):
                changed.ops[0] = swapped
            else:
                changed.op = swapped
            yield f"({ast.unparse(changed)})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.IfExp):
        yield f"({ast.unparse(node.body)})"
        yield f"({ast.unparse(node.orelse)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield f"({node.value + 1!r})"
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield "return None"
    elif isinstance(node, ast.AugAssign | ast.Raise | ast.Expr):
        yield "pass"
    elif isinstance(node, ast.Break):
        yield "continue"
    elif isinstance(node, ast.Continue):
        yield "break"


def _copy(node: Any) -> Any:
    return ast.parse(ast.unparse(node), mode="eval").body


def switched(source: bytes, changes: Mapping[int, Place], functions: int = -1) -> bytes:
    """Return the source of one file with each change beside what it replaces; `mutated.on` chooses, by the number.

    Args:
        functions: the number that the file's other statements tell `mutated.on`.
    """
    inserts = list[tuple[int, bool, int, bool, str]]()
    on = '__import__("mutated").on({})'.format
    for number, place in changes.items():
        begin, end, text = place.begin, place.end, place.text
        if place.is_statement:
            indent = source[source.rfind(b"\n", 0, begin) + 1 : begin].decode()
            inserts.append((begin, True, -end, False, f"if {on(number)}: {text}\n{indent}else: "))
        else:
            inserts.append((begin, True, -end, True, f"({text} if {on(number)} else ("))
            inserts.append((end, False, 0, False, "))"))
    changed = {place.begin for place in changes.values() if place.is_statement}
    for place in places("", source.decode()):
        if place.is_statement and place.begin not in changed:
            inserts.append((place.begin, True, -place.end, False, f"{on(functions)}; "))
    for at, *_, text in sorted(inserts, reverse=True):  # outer ones first, and ends before what begins there
        source = source[:at] + text.encode() + source[at:]
    return source


Key = tuple[str, str, int, str, int]
"""A place in any commit: its file, its line, where in that, the change, and which of several such it is."""


def draw(root: Path, number: int, seed: int, among: Path | None = None, at: Sequence[str] = ()) -> list[Place]:
    """Draw places of the source below `root`/handler, and of those only what the source below `among` has too.

    Args:
        at: folders, files, and lines (`file:line`) to draw from; empty is all.
    """
    found = {key: place for key, place in _keyed(root).items() if not at or _is_within(place, at)}
    keys = sorted(found if among is None else found.keys() & _keyed(among).keys())
    return [found[key] for key in random.Random(seed).sample(keys, min(number, len(keys)))]


def _is_within(place: Place, at: Sequence[str]) -> bool:
    return any(f"{place.path}:{place.line}" == one or Path(place.path).is_relative_to(one) for one in at)


def _keyed(root: Path) -> dict[Key, Place]:
    found: dict[Key, Place] = {}
    for path in sorted(path for path in (root / "handler").rglob("*.py") if "static" not in path.parts):
        source = path.read_bytes()
        seen: Counter[tuple[str, int, str]] = Counter()
        for place in places(str(path.relative_to(root)), source.decode()):
            start = source.rfind(b"\n", 0, place.begin) + 1
            line = source[start:].split(b"\n", 1)[0].decode()
            like = line, place.begin - start, place.text
            key = place.path, *like, seen[like]
            found[key] = place
            seen[like] += 1
    return found


def clone(root: Path, commit: str, repository: Path = ROOT) -> Path:
    """Make a clone of one commit at `root`, and return that."""
    subprocess.run(["git", "clone", "--quiet", "--no-checkout", "--shared", str(repository), str(root)], check=True)
    subprocess.run(["git", "checkout", "--quiet", "--detach", commit], cwd=root, check=True)
    return root


def run(
    root: Path, drawn: Sequence[Place], tests: Sequence[str], budget: float, recorded: Path, marks: str = QUICK
) -> int:
    """Try the changes in the clone at `root`; return pytest's status."""
    by_path: dict[str, dict[int, Place]] = {}
    for number, place in enumerate(drawn):
        by_path.setdefault(place.path, {})[number] = place
    modules = {path: len(drawn) + index for index, path in enumerate(by_path)}
    for path, changes in by_path.items():
        (root / path).write_bytes(switched((root / path).read_bytes(), changes, modules[path]))
    (root / "mutated.py").write_text(SWITCH)
    told = [f"{place.path}:{place.line}: {place.text.splitlines()[0][:80]}" for place in drawn]
    plan = Plan(
        told,
        [modules[place.path] for place in drawn],
        [place.outside for place in drawn],
        budget,
        str(recorded.absolute()),
    )
    paths = os.pathsep.join([str(root), str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": paths, _PLAN: json.dumps(plan)}
    command = [sys.executable, "-m", "pytest", *_PYTEST, "-s", "-p", "mutate", "-m", marks, *tests]
    return subprocess.run(command, cwd=root, env=environment).returncode


def covering(
    numbers: Collection[int], recorded: Mapping[str, Recorded], budget: float, *, beside: bool = False
) -> list[str]:
    """Return tests that execute one of the places, the fastest ones, up to `budget` seconds of them; at least one.

    Those of a file stand together, since they share its fixtures.

    Args:
        beside: take the other tests of their files too; one that only reads a constant executes no place.
    """
    found = [name for name, test in recorded.items() if not set(numbers).isdisjoint(test.numbers)]
    if beside:
        of = set(map(_file, found))
        found = [name for name in recorded if _file(name) in of]
    names: list[str] = []
    for name in sorted(found, key=lambda name: recorded[name].seconds):
        if recorded[name].passed:
            budget -= recorded[name].seconds
            if names and budget < 0:
                break
            names.append(name)
    files = list(dict.fromkeys(_file(name) for name in names))
    return sorted(names, key=lambda name: files.index(_file(name)))


def _limit(names: Sequence[str], recorded: Mapping[str, Recorded]) -> float:
    """Return the seconds after which tests count as hanging."""
    return 30 + 5 * sum(recorded[name].seconds for name in names)


def _file(test: str) -> str:
    return test.partition("::")[0]


def fork(what: Callable[[], bool]) -> int:
    """Run `what` in a child process that leads a session; return its id. Its status is 0 if `what` returns True."""
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(nowhere, stream)
            os._exit(not what())
        finally:
            os._exit(1)
    return child


def ends_well(child: int, seconds: float = float("inf")) -> bool:
    """Wait for a process; return whether it ends in time, with status 0. Its children end with it."""
    limit, ended, status = time.monotonic() + seconds, 0, 1
    while not ended and time.monotonic() < limit:
        time.sleep(0.02)
        ended, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # with the servers that its tests have started
    if not ended:
        os.waitpid(child, 0)
    return bool(ended) and status == 0


class Plugin:
    """pytest's plugin in the clone: runs the changes in place of the usual loop over the tests."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._record_file = plan, Path(plan.recorded)
        self._mutated: Any = importlib.import_module("mutated")
        self._items: dict[str, pytest.Item] = {}
        self._passes, self._began = True, 0.0
        self._controls = dict[tuple[str, ...], bool]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._passes &= not report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        at_import = set(self._mutated.executed)
        self._items = {item.nodeid: item for item in session.items}
        if not self._record_file.exists():
            self._record()
        of_places, tests = json.loads(self._record_file.read_text())
        if of_places != self._plan.places:
            raise pytest.UsageError(f"{self._record_file} is the record of other places")
        recorded = {name: Recorded(*test) for name, test in tests.items() if name in self._items}
        passed = [name for name, test in recorded.items() if test.passed and test.numbers]
        print(f"\n{len(passed)} of {len(recorded)} tests pass and execute a place", flush=True)
        if not self._try(-1, passed[:: max(1, len(passed) // 50)], 600):
            raise pytest.UsageError("tests that passed at first fail without a change")
        caught = uncovered = 0
        for number, (place, module, outside) in enumerate(
            zip(self._plan.places, self._plan.modules, self._plan.outside, strict=True)
        ):
            names, uncontrolled = covering([number], recorded, self._plan.budget), False
            found = bool(names) and not self._try(number, names, _limit(names, recorded))
            if not found and (outside or number in at_import):  # a test that imports it first has executed it alone
                same = [other for other, of in enumerate(self._plan.modules) if of == module]
                names = covering([number, module, *same], recorded, self._plan.budget, beside=True)
                failed = bool(names) and not self._try_anew(number, names, _limit(names, recorded))
                found = failed and self._passes_anew(names, _limit(names, recorded))
                uncontrolled = failed and not found
            caught, uncovered = caught + found, uncovered + (not names)
            verdict = "caught" if found else "MISSED" if names else "MISSED, no test executes it"
            verdict += ", its tests fail without it too" * uncontrolled
            print(f"{place}  {verdict}", flush=True)
        total = len(self._plan.places)
        print(f"{caught} of {total} caught ({caught / total:.1%}), {uncovered} in places that no test executes")
        return True

    def _record(self) -> None:
        """Run all tests without a change, in two forks, each of which has half of the files, and write the file."""
        files = list(dict.fromkeys(map(_file, self._items)))
        halves = [[name for name in self._items if _file(name) in files[half::2]] for half in range(2)]
        parts = [self._record_file.with_suffix(f".{half}") for half in range(2)]

        def record(names: Sequence[str], part: Path) -> bool:
            tests = dict[str, Recorded]()
            for name in self._run(names):
                tests[name] = Recorded(self._passes, time.monotonic() - self._began, sorted(self._mutated.executed))
            part.write_text(json.dumps(tests))
            return True

        children = [fork(partial(record, *half)) for half in zip(halves, parts, strict=True)]
        ended = [ends_well(child) for child in children]
        if not all(ended):
            raise pytest.UsageError("the run that records did not end")
        tests = {name: test for part in parts for name, test in json.loads(part.read_text()).items()}
        self._record_file.write_text(json.dumps([self._plan.places, tests]))

    def _try(self, number: int, names: Sequence[str], seconds: float) -> bool:
        """Return whether the tests pass with a change."""

        def passes() -> bool:
            self._mutated.chosen = number
            os.environ[_CHOSEN] = str(number)
            for name in self._run(names):
                if not self._passes:
                    self._items[name].session._setupstate.teardown_exact(None)  # servers end, forks of theirs too
                    return False
            return True

        return ends_well(fork(passes), seconds)

    def _try_anew(self, number: int, names: Sequence[str], seconds: float) -> bool:
        """Return whether the tests pass with a change, in a process that imports all modules again."""
        arguments = self._record_file.with_suffix(".tests")
        arguments.write_text("".join(f"{name}\n" for name in names))
        command = [sys.executable, "-m", "pytest", *_PYTEST, "-x", f"@{arguments}"]

        def execute() -> bool:
            os.execve(sys.executable, command, {**os.environ, _CHOSEN: str(number)})

        return ends_well(fork(execute), seconds)

    def _passes_anew(self, names: Sequence[str], seconds: float) -> bool:
        """Return whether the tests pass without a change, in a new process and in this order."""
        if (key := tuple(names)) not in self._controls:
            self._controls[key] = self._try_anew(-1, names, seconds)
        return self._controls[key]

    def _run(self, names: Sequence[str]) -> Iterator[str]:
        """Run tests, and yield the name of each after it."""
        items = [self._items[name] for name in names]
        for item, following in itertools.zip_longest(items, items[1:]):
            self._passes, self._began = True, time.monotonic()
            self._mutated.executed.clear()
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            yield item.nodeid


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin, in the clone."""
    if plan := os.environ.get(_PLAN):
        config.pluginmanager.register(Plugin(Plan(*json.loads(plan))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--commit", default="HEAD", help="whose source and tests (default: %(default)s)")
    add("--among", help="another commit: draw only places that it has too")
    add("--number", type=int, default=300, help="of changes (default: %(default)s)")
    add("--seed", type=int, default=1, help="of the draw (default: %(default)s)")
    add("--at", nargs="+", default=[], metavar="WHERE", help="draw only from these folders, files and file:line")
    add("--budget", type=float, default=10.0, help="seconds of tests for each change (default: %(default)s)")
    add("--tests", nargs="+", default=["tests/unit", "tests/app"], help="(default: tests/unit tests/app)")
    add("--marks", default=QUICK, help="pytest's -m (default: %(default)s)")
    add("--recorded", type=Path, help="a file that keeps the record: a run of the same commit and draw begins with it")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        root = clone(Path(folder) / "clone", given.commit)
        among = clone(Path(folder) / "among", given.among) if given.among else None
        drawn = draw(root, given.number, given.seed, among, given.at)
        return run(
            root, drawn, given.tests, given.budget, given.recorded or Path(folder) / "recorded.json", given.marks
        )


if __name__ == "__main__":
    raise SystemExit(main())
