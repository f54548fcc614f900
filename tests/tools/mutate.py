"""Change `handler/` in places drawn at random, one at a time, and count the changes that tests notice.

    python -m tests.tools.mutate [--commit REV] [--among REV] [--number 300] [--seed 1] [--tests tests/unit tests/app]

The same seed draws the same places from the same source, so a pruning of tests can be compared with the commit before.
Where the source has changed as well, `--among` draws from what both commits have: two runs, each among the other's.
All runs are in a clone of the commit, in a temporary directory. First, one run with coverage records which tests
execute which lines. Each change is then held against the tests that execute its line. A change is caught when a test
fails, or when the tests take far longer than before. A line that no test executes is not caught.
What a module does when it is imported is held against the tests that execute its functions.

Neither mutmut nor Cosmic Ray: the first swaps whole functions within one process, which engines' processes do not see,
and changes all places; the second runs all tests for each change.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.BitOr: ast.BitAnd,
}  # fmt: skip
ROOT = Path(__file__).parents[2]
QUICK = "not model and not clients and not djl and not vllm"
"""The tests of `make test`."""
FIRST = 40
"""Tests of a change that run first, the fastest: most changes are caught by them, and few files are collected."""
_PYTEST = ("-q", "-n", "0", "-p", "no:cacheprovider")
_LIBRARIES = ("aiohttp.web", "boto3", "httpx", "jinja2", "jsonschema", "numpy", "pydantic", "rich.console",
              "starlette.applications", "trustme", "uvicorn", "xdist.plugin")  # fmt: skip
"""What tests import and no change touches: read once."""
_RECORD = "MUTATE_RECORD"
"""The environment variable that names the plugin's file."""


class Place(NamedTuple):
    """A change: bytes `begin` to `end` of the file become `text`.

    Attributes:
        lines: those of the simple statement around it.
        at_import: no function has it.
    """

    path: str
    lines: range
    begin: int
    end: int
    text: str
    at_import: bool = False


class Recorded(NamedTuple):
    """One test: whether it passed, its seconds, and the lines that it executes, by file."""

    passed: bool
    seconds: float
    lines: dict[str, list[int]]


def places(path: str, source: str) -> Iterator[Place]:
    """Yield the changes of one file, in order."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(node: Any, statement: ast.stmt, text: str) -> Place:
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        around: Any = node if hasattr(statement, "body") else statement
        at_import = not any(begins < around.lineno <= ends for begins, ends in functions)
        return Place(path, range(around.lineno, around.end_lineno + 1), begin, end, text, at_import)

    tree = ast.parse(source)
    functions = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for statement, node in _nodes(tree.body):
        for text in _changes(node):
            yield place(node, statement, text)


def _nodes(body: Sequence[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.AST]]:
    """Yield the nodes that a change may be made of, each with its statement; no docstrings and no annotations."""
    for statement in body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            continue
        yield statement, statement
        for name, value in ast.iter_fields(statement):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.expr | ast.arguments | ast.withitem) and name not in ("annotation", "returns"):
                    yield from ((statement, node) for node in _expressions(child))
                elif isinstance(child, ast.stmt):
                    yield from _nodes([child])
                elif isinstance(child, ast.ExceptHandler | ast.match_case):
                    yield from _nodes(child.body)


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


Key = tuple[str, str, int, str, int]
"""A place in any commit: its file, its line, where in that, the change, and which of several such it is."""


def draw(root: Path, number: int, seed: int, among: Path | None = None) -> list[Place]:
    """Draw places of the source below `root`/handler, and of those only what the source below `among` has too."""
    found = _keyed(root)
    keys = sorted(found if among is None else found.keys() & _keyed(among).keys())
    return [found[key] for key in random.Random(seed).sample(keys, min(number, len(keys)))]


def _keyed(root: Path) -> dict[Key, Place]:
    found: dict[Key, Place] = {}
    for path in sorted(path for path in (root / "handler").rglob("*.py") if "static" not in path.parts):
        source = path.read_bytes()
        seen: Counter[tuple[str, int, str]] = Counter()
        for place in places(str(path.relative_to(root)), source.decode()):
            start = source.rfind(b"\n", 0, place.begin) + 1
            line = source[start:].split(b"\n", 1)[0].decode()
            like = line, place.begin - start, place.text
            found[(place.path, *like, seen[like])] = place
            seen[like] += 1
    return found


class Clone:
    """A clone of one commit, in which tests run.

    Args:
        root: where it will be; files of the runs go beside it.
    """

    def __init__(self, root: Path, commit: str, repository: Path = ROOT) -> None:
        self.root = root
        subprocess.run(["git", "clone", "--quiet", "--no-checkout", "--shared", str(repository), str(root)], check=True)
        subprocess.run(["git", "checkout", "--quiet", "--detach", commit], cwd=root, check=True)

    def record(self, tests: Sequence[str]) -> dict[str, Recorded]:
        """Run the tests once; return each by its id."""
        file = self.root.parent / "recorded.json"
        self.run("-p", "mutate", "-m", QUICK, *tests, **{_RECORD: str(file)})
        if not file.exists():
            raise SystemExit("the run with coverage did not end: see above")
        return read(file)

    def catches(self, place: Place, tests: Sequence[str], seconds: float) -> bool:
        """Make the change, run the tests until one fails, and undo it.

        Args:
            seconds: after which the change counts as caught.
        """
        path = self.root / place.path
        before, stat = path.read_bytes(), path.stat()
        try:
            path.write_bytes(before[: place.begin] + place.text.encode() + before[place.end :])
            os.utime(path, (stat.st_atime, stat.st_mtime + 10))  # else compiled code of the same second could be taken
            few, others = tests[:FIRST], tests[FIRST:]
            return self._fails(few, seconds) or (bool(others) and self._fails(others, seconds))
        finally:
            path.write_bytes(before)
            os.utime(path, (stat.st_atime, stat.st_mtime))

    def run(self, *arguments: str, **variables: str) -> None:
        """Run pytest, and show what it prints."""
        environment = {**os.environ, **self._environment(), **variables}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        subprocess.run([sys.executable, "-m", "pytest", *_PYTEST, *arguments], cwd=self.root, env=environment)

    def _fails(self, tests: Sequence[str], seconds: float) -> bool:
        """Run them until one fails, in a process that has the libraries already."""
        names = self.root.parent / "tests"
        names.write_text("".join(f"{name}\n" for name in tests))
        child = os.fork()
        if child == 0:
            self._run(["-x", f"@{names}"])
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # with the servers that its tests have started
        if not ended:
            os.waitpid(child, 0)
        return not ended or status != 0

    def _run(self, arguments: Sequence[str]) -> NoReturn:
        """Become pytest in the clone, in a process of its own."""
        try:
            os.setsid()
            os.chdir(self.root)
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(nowhere, stream)
            os.environ.update(self._environment(), PYTHONDONTWRITEBYTECODE="1")
            sys.dont_write_bytecode = True  # of the change; all other files have theirs since the record
            sys.path[:] = [str(self.root), *(path for path in sys.path if Path(path).resolve() != ROOT)]
            for name in [name for name in sys.modules if name.split(".")[0] in ("deploy", "handler", "proof", "tests")]:
                del sys.modules[name]
            status = pytest.main([*_PYTEST, "-W", "ignore::pytest.PytestAssertRewriteWarning", *arguments])
            os._exit(int(status))
        finally:
            os._exit(1)

    def _environment(self) -> dict[str, str]:
        return {"PYTHONPATH": os.pathsep.join([str(self.root), str(Path(__file__).parent)])}


def read(file: Path) -> dict[str, Recorded]:
    """Return what `Clone.record` has written."""
    return {name: Recorded(*values) for name, values in json.loads(file.read_text()).items()}


def covering(place: Place, recorded: dict[str, Recorded], budget: float) -> list[str]:
    """Return the tests that execute the place, the fastest first, up to `budget` seconds of them; at least one.

    A module's tables are made when it is imported, before any test: theirs are the tests that execute its functions.
    """
    names: list[str] = []
    for name in sorted(recorded, key=lambda name: recorded[name].seconds):
        test = recorded[name]
        executed = test.lines.get(place.path, ())
        if test.passed and executed and (place.at_import or not set(place.lines).isdisjoint(executed)):
            budget -= test.seconds
            if names and budget < 0:
                break
            names.append(name)
    return names


def check(clone: Clone, recorded: dict[str, Recorded]) -> None:
    """Run one test without a change: else a mistake of ours would count as 300 caught changes.

    Raises:
        SystemExit: it fails.
    """
    names = [name for name, test in recorded.items() if test.passed and test.lines]
    if not names:
        raise SystemExit("no test passes that executes handler/")
    path = next(iter(recorded[names[0]].lines))
    if clone.catches(Place(path, range(0), 0, 0, ""), names[:: max(1, len(names) // 50)], 600):
        raise SystemExit("tests that pass with coverage fail without")


class Plugin:
    """What pytest runs with, in the clone: which lines each test executes, whether it passes, how long it takes."""

    def __init__(self, file: Path) -> None:
        import coverage

        self._file = file
        self._coverage = coverage.Coverage(data_file=None, source=["handler"])
        self._tests: dict[str, list[Any]] = {}

    def pytest_sessionstart(self) -> None:
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self._coverage.switch_context(item.nodeid)
        began = time.monotonic()
        self._tests[item.nodeid] = [True, 0.0, {}]
        try:
            return (yield)
        finally:
            self._tests[item.nodeid][1] = time.monotonic() - began

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tests[report.nodeid][0] &= not report.failed

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        data = self._coverage.get_data()
        for path in data.measured_files():
            name = str(Path(path).relative_to(Path.cwd()))
            for line, contexts in data.contexts_by_lineno(path).items():
                for test in contexts:
                    if test in self._tests:
                        self._tests[test][2].setdefault(name, []).append(line)
        self._file.write_text(json.dumps(self._tests))


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin, in the run that records."""
    if file := os.environ.get(_RECORD):
        config.pluginmanager.register(Plugin(Path(file)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--commit", default="HEAD", help="whose source and tests (default %(default)s)")
    add("--among", help="another commit: draw only places that it has too")
    add("--number", type=int, default=300, help="of changes (default %(default)s)")
    add("--seed", type=int, default=1, help="of the draw (default %(default)s)")
    add("--budget", type=float, default=10.0, help="seconds of tests for each change (default %(default)s)")
    add("--tests", nargs="+", default=["tests/unit", "tests/app"], help="(default tests/unit tests/app)")
    add("--recorded", help="the record of an earlier run of the same commit")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        clone = Clone(Path(folder) / "clone", given.commit)
        among = Clone(Path(folder) / "among", given.among).root if given.among else None
        drawn = draw(clone.root, given.number, given.seed, among)
        if given.recorded:
            clone.run("--collect-only", *given.tests)  # writes the files' bytecode
            recorded = read(Path(given.recorded))
        else:
            recorded = clone.record(given.tests)
        for library in _LIBRARIES:
            with contextlib.suppress(ImportError):
                importlib.import_module(library)
        check(clone, recorded)
        caught = uncovered = 0
        for place in drawn:
            tests = covering(place, recorded, given.budget)
            limit = 60 + 5 * sum(recorded[name].seconds for name in tests)
            found = bool(tests) and clone.catches(place, tests, limit)
            caught, uncovered = caught + found, uncovered + (not tests)
            verdict = "caught" if found else "MISSED" if tests else "MISSED, no test executes it"
            print(f"{place.path}:{place.lines[0]}: {place.text.splitlines()[0][:80]}  {verdict}", flush=True)
    print(f"{caught} of {len(drawn)} caught ({caught / len(drawn):.1%}), {uncovered} in lines that no test executes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
