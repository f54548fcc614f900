"""`make install` where it cannot install: what is missing is named at once, with what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.accept.test_constraints import ALL, PYTHONS, environment
from tests.container.images.dockerfile import ROOT
from tests.environment import clean_environment
from tests.install import UV

VERSIONS = ALL.versions(environment("{}.{}".format(*sys.version_info), os.uname().machine))
ORJSON = f"orjson=={VERSIONS['orjson']}"
PINNED = f"{ORJSON}, which .ci/constraints.txt pins"
NEWEST = "or take the newest versions: `make LATEST=1 ...`\n"


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """Each pinned version as a wheel without content, as no index has it."""
    directory = tmp_path / "index"
    directory.mkdir()
    for name, version in VERSIONS.items():
        wheel(directory, name, str(version))
    return directory


def remove(directory: Path, name: str) -> None:
    [path] = directory.glob(f"{name}-*")
    path.unlink()


def wheel(directory: Path, name: str, version: str, tag: str = "py3-none-any") -> None:
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(directory / f"{stem}-{tag}.whl", "w") as archive:
        archive.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """As make leaves it before it installs the packages."""
    directory = tmp_path / "venv"
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, directory], check=True)
    (directory / "bin" / "uv").symlink_to(UV)
    return directory


def install(venv: Path, *variables: str, **settings: str) -> str:
    """What `make install` writes to its errors."""
    others = ("UV_", "PIP_", "MAKE", "LATEST")
    ours = {name: text for name, text in clean_environment().items() if not name.startswith(others)}
    command = ["make", "--directory", str(ROOT), f"VENV={venv}", f"PYTHON={sys.executable}", *variables, "install"]
    done = subprocess.run(command, capture_output=True, text=True, env={**ours, **settings})
    assert done.returncode == 2, done.stderr
    assert not (venv / ".cpu").exists()
    return done.stderr


def only(index: Path) -> dict[str, str]:
    file = index / "uv.toml"
    file.write_text(f"no-index = true\nfind-links = ['{index}']\n")
    return {"UV_CONFIG_FILE": str(file)}


@pytest.mark.parametrize("others", [[], ["3.10.1"]], ids=["no version", "another version"])
def test_an_index_that_lacks_a_pinned_version(others: list[str], index: Path, venv: Path) -> None:
    remove(index, "orjson")
    for version in others:
        wheel(index, "orjson", version)
    assert f"\nthis index lacks {PINNED}: ask for it at your mirror, {NEWEST}" in install(venv, **only(index))


def test_an_index_that_lacks_what_no_file_pins(index: Path, venv: Path) -> None:
    remove(index, "orjson")
    said = install(venv, "LATEST=1", **only(index))
    assert said.splitlines()[-2] == "this index lacks orjson: ask for it at your mirror"


@pytest.mark.parametrize("tag", ["cp311-cp311-win_amd64", "cp39-cp39-manylinux_2_17_x86_64"], ids=["system", "Python"])
def test_a_package_without_a_wheel_for_this_machine(tag: str, index: Path, venv: Path) -> None:
    remove(index, "orjson")
    wheel(index, "orjson", str(VERSIONS["orjson"]), tag)
    said = install(venv, **only(index))
    this = f"Python {'.'.join(map(str, sys.version_info[:3]))} on Linux {os.uname().machine}"
    assert f"\nthis index has no wheel of {ORJSON} for {this} " in said
    assert f", which .ci/constraints.txt pins: try another Python (`make PYTHON=python3.12 ...`), {NEWEST}" in said


def test_files_that_are_not_those_that_were_tested(index: Path, venv: Path) -> None:
    said = install(venv, **only(index))
    assert "than the one that was tested: ask for that at your mirror\n" in said
    assert "LATEST" not in said, "an unknown file is no reason to take any"


def test_an_index_that_does_not_answer(venv: Path, tmp_path: Path) -> None:
    nobody = {"UV_DEFAULT_INDEX": "http://127.0.0.1:1/simple", "UV_HTTP_RETRIES": "0"}
    said = install(venv, UV_CACHE_DIR=str(tmp_path / "cache"), **nobody)
    assert "\nthe index does not answer: UV_DEFAULT_INDEX names another one to uv, PIP_INDEX_URL to pip\n" in said


def test_a_time_before_the_pinned_versions(venv: Path) -> None:
    said = install(venv, UV_EXCLUDE_NEWER="2026-06-01")
    assert "\nUV_EXCLUDE_NEWER hides " in said
    assert f", which .ci/constraints.txt pins: unset it, {NEWEST}" in said


def test_uv_itself_is_pinned(tmp_path: Path) -> None:
    said = install(tmp_path / "venv", PIP_NO_INDEX="1")
    pin = f"uv=={VERSIONS['uv']}, which .ci/constraints.txt pins"
    assert f"\nthis index lacks {pin}: ask for it at your mirror, {NEWEST}" in said


@pytest.mark.parametrize("version", ["(3, 9, 2)", "(3, 15, 0)"])
def test_a_python_that_is_too_old_or_too_new(version: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = {version}; $2"\n')
    python.chmod(0o755)
    said = install(tmp_path / "venv", f"PYTHON={python}")
    this = ".".join(version.strip("()").split(", ")[:2])
    assert f"lmi-handler needs Python {PYTHONS[0]} to {PYTHONS[-1]}, this is {this} " in said
    assert "make PYTHON=python3.12 ..." in said
    assert not (tmp_path / "venv").exists()
