"""`.ci/run`'s words on tests that fail at first, by a Makefile of the test's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

RUN = Path(__file__).parents[2] / ".ci" / "run"
MAKEFILE = """
.DEFAULT:
	@true

test:
	@$(PYTHON) -m pytest -q -p no:xdist -p no:hypothesispytest --rootdir . .
"""
TESTS = """
import pathlib

import pytest


@pytest.mark.parametrize("number", range({flaky}))
def test_flaky(number):
    file = pathlib.Path(f"tried-{{number}}")
    tried = file.exists()
    file.touch()
    assert tried


def test_it_works():
    pathlib.Path("worked").open("a").write("once ")


def test_it_is_broken():
    assert not {broken}
"""


def ci(directory: Path, flaky: int, broken: bool = False, options: tuple[str, ...] = ()) -> tuple[int, list[str]]:
    """Run CI where only `make test` does anything; return its status and its last lines."""
    (directory / ".ci").mkdir()
    shutil.copy(RUN, directory / ".ci" / "run")
    (directory / "Makefile").write_text(MAKEFILE)
    (directory / "test_it.py").write_text(TESTS.format(flaky=flaky, broken=broken))
    (directory / "bin").mkdir()
    (directory / "bin" / "dpkg").symlink_to("/bin/true")  # all packages are installed
    environ = {"PATH": f"{directory / 'bin'}:{os.environ['PATH']}", "PYTHON": sys.executable}
    done = subprocess.run([directory / ".ci" / "run", *options], env=environ, capture_output=True, text=True)
    return done.returncode, done.stdout.partition("== all\n")[2].splitlines()


@pytest.mark.parametrize(("flaky", "status"), [(0, 0), (5, 0), (6, 1)])
def test_flaky_tests_are_listed_and_more_than_five_fail_the_run(tmp_path: Path, flaky: int, status: int) -> None:
    found, lines = ci(tmp_path, flaky)
    named = [f"    test: test_it.py::test_flaky[{number}]" for number in range(flaky)]
    said = [f"FLAKY: {flaky} failed at first, and passed on the second try:", *named] if flaky else []
    if status:
        said.append("FAILED: more than 5 are flaky")
    assert found == status
    assert lines[len(lines) - len(said) :] == said
    assert ("FLAKY" in "".join(lines)) == bool(flaky)
    assert (tmp_path / "worked").read_text() == "once ", "what passed is not run again"


def test_a_broken_suites_flaky_tests_are_named_too(tmp_path: Path) -> None:
    status, lines = ci(tmp_path, 1, broken=True)
    assert status == 1
    assert "test: FAILED, or did not end: build/ci/test.log" in lines
    assert lines[-1] == "    test: test_it.py::test_flaky[0]"


def test_a_suite_that_did_not_run_to_its_end_is_not_saved_by_a_second_try(tmp_path: Path) -> None:
    """pytest's record has only the file that could not be imported, not the tests that it did not come to."""
    flaky = "import pathlib\n\nfile = pathlib.Path('tried')\nfound = file.exists()\nfile.touch()\nassert found\n"
    (tmp_path / "test_import.py").write_text(flaky)
    status, lines = ci(tmp_path, 0)
    assert status == 1
    assert "test: FAILED, or did not end: build/ci/test.log" in lines


@pytest.mark.parametrize("options", [(), ("--nightly",)])
def test_suites_that_draw_at_random_run_at_night_only(tmp_path: Path, options: tuple[str, ...]) -> None:
    status, lines = ci(tmp_path, 0, options=options)
    ran = {line.partition(":")[0] for line in lines}
    assert status == 0
    assert {"test", "accept-vllm", "test-attacks"} <= ran
    assert ("test-fuzz" in ran) == bool(options)


def test_an_unknown_option_runs_nothing(tmp_path: Path) -> None:
    assert ci(tmp_path, 0, options=("nightly",)) == (2, [])
