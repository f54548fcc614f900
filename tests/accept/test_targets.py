"""Each target of the Makefile runs in an environment of its own: what it runs imports no package of another's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import extras
from tests.environment import clean_environment

ROOT = Path(__file__).parents[2]
_RULE = re.compile(r"^([a-z%-]+):([^#\n]*)(?:#.*)?\n((?:\t.*\n)+)", re.MULTILINE)
_WHOLE = "dev"
_ELSEWHERE = {"accept-trtllm": ()}
"""Targets that run in an environment of the user's, with lmi-handler."""


class Target(NamedTuple):
    name: str
    extras: tuple[str, ...] | None
    module: str


def targets() -> list[Target]:
    """What the Makefile runs with Python where the packages of `dev` need not be."""
    found: list[Target] = []
    for name, needs, recipe in _RULE.findall((ROOT / "Makefile").read_text()):
        words = {word.removeprefix("$(VENV)/.").replace("install", "cpu") for word in needs.split()}
        if _WHOLE not in words:
            made = ("cpu", "deploy", *(words & {"djl"})) if words & {"cpu", "djl"} else _ELSEWHERE.get(name)
            modules = re.findall(r"(?<!\$\$)(?:python|PYTHON\)) -m (\S+)", recipe)
            modules += ["handler.cli"] * ("$(BIN)/lmi" in recipe)
            found += [Target(name, made, module) for module in modules if module.startswith(("tests.", "handler."))]
    return sorted(set(found), key=str)


def test_the_makefile_is_read() -> None:
    assert {(target.name, target.extras) for target in targets()} >= {
        ("serve", ("cpu", "deploy")),
        ("djl", ("cpu", "deploy", "djl")),
        ("constraints", None),
        ("docs", None),
    }


def run(target: Target, tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    environ = {**clean_environment(), **extras.only(target.extras, tmp_path / "packages")}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True)


@pytest.mark.parametrize("target", targets(), ids=lambda target: f"{target.name}-{target.module}")
def test_a_target_imports_only_the_packages_of_its_extras(target: Target, tmp_path: Path) -> None:
    main = f"{target.module}.__main__" if (ROOT / target.module.replace(".", "/")).is_dir() else target.module
    done = run(target, tmp_path, f"import {main}")
    assert done.returncode == 0, done.stderr


def test_other_packages_cannot_be_imported_there(tmp_path: Path) -> None:
    for packages, refused in ((None, "starlette"), ((), "numpy"), (("cpu",), "boto3"), (("cpu", "djl"), "httpx")):
        done = run(Target("", packages, ""), tmp_path, f"import {refused}")
        assert f"No module named '{refused}'" in done.stderr
    assert run(Target("", ("djl",), ""), tmp_path, "import numpy, psutil, starlette").returncode == 0
