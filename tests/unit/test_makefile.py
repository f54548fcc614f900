"""The Makefile's variables, by a target of the test's own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("arguments", "environ"), [((), {"PORT": "9"}), (("PORT=9",), {})])
def test_the_port_is_that_of_make_serve_alone(
    arguments: tuple[str, ...], environ: dict[str, str], tmp_path: Path
) -> None:
    """Not of what make starts: `lmi` would say that PORT, a variable of TGI's, has no effect."""
    more = tmp_path / "more.mk"
    more.write_text("show:\n\t@echo '$(PORT)' \"in the environment: $$PORT\"\n")
    command = ["make", "--no-print-directory", "-s", "-f", "Makefile", "-f", str(more), "show", *arguments]
    environ = {"PATH": os.environ["PATH"], **environ}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "9 in the environment: \n"


def test_the_demo_model_is_converted_before_vllms_tests_begin() -> None:
    """Its half a minute would count in the time of the first test that wants it."""
    command = ["make", "--no-print-directory", "-n", "accept-vllm", "VLLM_PYTHON=python"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert 0 < done.stdout.index("-m tests.gpu.vllm.checkpoint &&") < done.stdout.index("-m pytest")


def test_pytest_alone_runs_what_make_test_runs_and_says_so() -> None:
    """Tests that need a model or an environment of their own are deselected."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-o", "testpaths=tests/djl/test_wire.py"]
    alone = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert "\nthe tests of `make test`; `make help` lists the suites of all others\n" in alone
    assert re.search(r"no tests collected \(\d+ deselected\)", alone)
    made = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not re.search("tests/| -m ", made), "the same files and markers"


def test_workflows_and_hooks_run_what_is_there() -> None:
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"]
    documents = {path.name: yaml.safe_load(path.read_text()) for path in files}
    jobs = [job for name in ("checks.yml", "nightly.yml") for job in documents[name]["jobs"].values()]
    commands = [step["run"].partition("#")[0].split() for job in jobs for step in job["steps"] if "run" in step]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [command for command in commands if command[0] == "make" and command[1] not in targets] == []
    assert [command[-1] for command in commands if command[0] != "make"] == [".ci/run"]
    (local,) = documents[".pre-commit-config.yaml"]["repos"]
    tools = {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in local["hooks"]}
    made = subprocess.run(["make", "-n", "lint"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {tool for tool in tools if f"/{tool}" not in made} == set()
