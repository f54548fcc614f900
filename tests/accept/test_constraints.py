"""`.ci/constraints.txt`: a version with hashes for all that make installs, on each Python and both processors."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / ".ci/constraints.txt").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("cpu", "deploy", "dev", "browser", "docs")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


def environment(python: str, machine: str) -> dict[str, str]:
    return {
        "python_version": python,
        "python_full_version": f"{python}.9",
        "platform_machine": machine,
        "sys_platform": "linux",
        "os_name": "posix",
        "platform_system": "Linux",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }


def pins(where: dict[str, str]) -> dict[str, Version]:
    """The versions for one environment, by name."""
    found: dict[str, Version] = {}
    for line in TEXT.splitlines():
        if line.startswith(("#", " ")):
            continue
        pin = Requirement(line.removesuffix("\\").strip())
        if pin.marker is None or pin.marker.evaluate(where):
            (specifier,) = pin.specifier
            assert specifier.operator == "=="
            assert pin.name not in found, f"{pin.name} has two versions"
            found[canonicalize_name(pin.name)] = Version(specifier.version)
    return found


@pytest.mark.parametrize(("python", "machine"), [*itertools.product(PYTHONS, ("x86_64", "aarch64"))])
def test_a_pin_is_in_the_range_of_each_requirement(python: str, machine: str) -> None:
    where = environment(python, machine)
    versions = pins(where)
    needed = [*PROJECT["dependencies"], *(line for extra in EXTRAS for line in PROJECT["optional-dependencies"][extra])]
    requirements = [Requirement(line) for line in [*needed, "setuptools>=77", "uv<1"]]
    for requirement in requirements:
        if requirement.name != PROJECT["name"] and (requirement.marker is None or requirement.marker.evaluate(where)):
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


def test_each_pin_has_hashes_and_no_index_is_named() -> None:
    blocks = re.split(r"\n(?=[a-z])", TEXT.partition("constraints\n")[2].strip())
    assert len(blocks) > 150
    for block in blocks:
        assert re.fullmatch(r"\S+==[^\n]+ \\\n( +--hash=sha256:[0-9a-f]{64}( \\)?\n?)+", block), block.splitlines()[0]
    assert "://" not in TEXT


def test_the_pins_are_for_all_pythons_that_the_package_names() -> None:
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert tuple(named) == PYTHONS
