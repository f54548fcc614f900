"""`make release`, run in a clone: what it writes belongs together, and to the commit and the pinned versions.

Its images are built by a program that only notes how it was called: nothing here builds real ones.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.accept.test_constraints import ALL, CPU, LLAMACPP, LLAMACPP_SOURCE, PROJECT, Pins
from tests.accept.test_constraints import environment as where
from tests.release import containers, distributions, provenance
from tests.release.checkout import clone
from tests.release.distributions import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

VERSION = PROJECT["version"]
WHEEL, SOURCE = f"lmi_handler-{VERSION}-py3-none-any.whl", f"lmi_handler-{VERSION}.tar.gz"
_BUILDAH = """#!/bin/sh
echo "$*" >> "$0.log"
case "$1" in
    push) file=${3#docker-archive:}; cp "$0.tar" "${file%%:*}" ;;
esac
"""
_STATUS = """Package: libgomp1
Architecture: amd64
Version: 12.2.0-14+deb12u1
Description: two lines
 Version: none

Package: base-files
Architecture: all
Version: 1:12.4

"""


def image(archive: Path, *layers: dict[str, str]) -> None:
    """Write an archive like that of `docker save`, of layers with these files."""
    names = [f"{number}.tar" for number in range(len(layers))]
    whole = {"manifest.json": json.dumps([{"Config": "config.json", "Layers": names}]).encode()}
    for name, files in zip(names, layers, strict=True):
        layer = io.BytesIO()
        pack(layer, {path: text.encode() for path, text in files.items()})
        whole[name] = layer.getvalue()
    with archive.open("wb") as file:
        pack(file, whole)


def pack(file: IO[bytes], files: dict[str, bytes]) -> None:
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


class Release:
    def __init__(self, directory: Path) -> None:
        self.checkout = clone(directory / "checkout")
        self.directory = self.checkout / "build" / "release"
        self.programs = directory / "programs"
        self.programs.mkdir()
        self.key = directory / "key"
        self.tools = directory / "tools"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key)], check=True)
        buildah = self.programs / "buildah"
        buildah.write_text(_BUILDAH)
        buildah.chmod(0o755)
        image(self.programs / "buildah.tar", {"etc/passwd": ""}, {"var/lib/dpkg/status": _STATUS}, {"opt/lmi": ""})

    def make(self, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
        """Run it with a search path, by default one with the program for images before this machine's."""
        command = [sys.executable, "-m", "tests.release", str(self.directory), "--tools", str(self.tools), *arguments]
        environ = {**os.environ, "PATH": path or f"{self.programs}{os.pathsep}{os.environ['PATH']}"}
        return subprocess.run(command, cwd=self.checkout, env=environ, capture_output=True, text=True)

    def bill(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / f"{name}.cdx.json").read_text())
        return found

    def statement(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / provenance.PROVENANCE).read_text())
        return found


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    made = Release(tmp_path_factory.mktemp("release"))
    done = made.make("--key", str(made.key), "--source", "https://example.com/lmi-handler")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not signed" not in done.stdout
    return made


def archives() -> list[str]:
    return [f"{image.name}-{VERSION}.tar" for image in containers.IMAGES if not containers.obstacle(image)]


@pytest.fixture
def built_here(monkeypatch: pytest.MonkeyPatch, release: Release) -> list[str]:
    monkeypatch.setenv("PATH", str(release.programs), prepend=os.pathsep)
    return archives()


def test_it_has_these_files(release: Release, built_here: list[str]) -> None:
    artifacts = {WHEEL, SOURCE, *built_here}
    beside = {"SHA256SUMS", "SHA256SUMS.sig", provenance.PROVENANCE}
    assert {path.name for path in release.directory.iterdir()} == {
        *artifacts,
        *(f"{name}.cdx.json" for name in artifacts),
        *beside,
    }
    assert built_here


def test_its_checksums_are_those_of_all_files(release: Release) -> None:
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=release.directory, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    checked = {line.partition(":")[0] for line in done.stdout.splitlines()}
    assert checked == {path.name for path in release.directory.iterdir() if not path.name.startswith("SHA256SUMS")}


def verified(release: Release, text: bytes, namespace: str = "lmi-handler") -> bool:
    signers = release.key.with_name("signers")
    signers.write_text(f"maintainer {release.key.with_suffix('.pub').read_text()}")
    command = ["ssh-keygen", "-Y", "verify", "-f", str(signers), "-I", "maintainer", "-n", namespace]
    command += ["-s", str(release.directory / "SHA256SUMS.sig")]
    return subprocess.run(command, input=text, capture_output=True).returncode == 0


def test_its_signature_is_of_these_checksums(release: Release) -> None:
    sums = (release.directory / "SHA256SUMS").read_bytes()
    assert verified(release, sums)
    assert not verified(release, sums.replace(b"0", b"1", 1))
    assert not verified(release, sums, "git"), "a signature for another purpose"


def test_its_provenance_names_each_file_and_the_commit(release: Release) -> None:
    found = release.statement()
    assert (found["_type"], found["predicateType"]) == (
        "https://in-toto.io/Statement/v1",
        "https://slsa.dev/provenance/v1",
    )
    digests = {subject["name"]: subject["digest"]["sha256"] for subject in found["subject"]}
    named = {path.name for path in release.directory.iterdir() if path.suffix in (".whl", ".gz", ".tar")}
    assert {*digests} == named | {f"{name}.cdx.json" for name in named}
    assert digests == {name: provenance.sha256(release.directory / name) for name in digests}
    commit = distributions.head(release.checkout)
    source, *locks = found["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert source["digest"] == {"gitCommit": commit}
    assert source["uri"] == f"git+https://example.com/lmi-handler@{commit}"
    assert {lock["name"]: lock["digest"]["sha256"] for lock in locks} == {
        pins.path: provenance.sha256(release.checkout / pins.path) for pins in (ALL, CPU, LLAMACPP, LLAMACPP_SOURCE)
    }


def packages(bill: dict[str, Any]) -> dict[str, str]:
    """The names and versions of a bill's packages of PyPI."""
    listed = [(one["name"], one["version"]) for one in bill["components"] if one["purl"].startswith("pkg:pypi/")]
    assert len(listed) == len({*listed})
    return {name: version for name, version in listed if name != "lmi-handler"}


@pytest.mark.parametrize("name", [WHEEL, SOURCE])
def test_a_distributions_bill_has_the_pinned_versions_of_what_a_user_installs(release: Release, name: str) -> None:
    bill = release.bill(name)
    root = bill["metadata"]["component"]
    assert (bill["bomFormat"], root["name"], root["version"]) == ("CycloneDX", "lmi-handler", VERSION)
    assert root["hashes"] == [{"alg": "SHA-256", "content": provenance.sha256(release.directory / name)}]
    found, here = packages(bill), where("3.11", "x86_64")
    pinned = {name: str(version) for name, version in ALL.versions(here).items()}
    assert found.items() <= pinned.items()
    wanted = map(Requirement, [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["cpu"]])
    direct = {canonicalize_name(one.name) for one in wanted if one.marker is None or one.marker.evaluate({**here})}
    assert direct <= {*found}
    assert not {"pytest", "boto3"} & {*found}, "nothing of other extras"


@pytest.mark.parametrize(("target", "locks"), [("cpu", [CPU]), ("llamacpp", [LLAMACPP, LLAMACPP_SOURCE])])
def test_an_images_bill_has_its_pins_and_its_debian_packages(release: Release, target: str, locks: list[Pins]) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("the images of x86 are built on x86")
    name = f"lmi-handler-{target}-{VERSION}.tar"
    bill = release.bill(name)
    root = bill["metadata"]["component"]
    assert (root["type"], root["name"]) == ("container", f"lmi-handler-{target}")
    assert root["hashes"] == [{"alg": "SHA-256", "content": provenance.sha256(release.directory / name)}]
    pinned = {name: str(version) for lock in locks for name, version in lock.versions(where("3.11", "x86_64")).items()}
    assert packages(bill) == pinned
    others = {one["purl"] for one in bill["components"] if not one["purl"].startswith("pkg:pypi/")}
    assert others == {
        "pkg:deb/debian/libgomp1@12.2.0-14%2Bdeb12u1?arch=amd64",
        "pkg:deb/debian/base-files@1%3A12.4?arch=all",
    }
    assert f"pkg:pypi/lmi-handler@{VERSION}" in {one["purl"] for one in bill["components"]}
    hashes = {
        one["content"]
        for component in bill["components"]
        for reference in component.get("externalReferences", ())
        for one in reference.get("hashes", ())
    }
    assert hashes <= {*re.findall(r"sha256:(\w{64})", "".join(lock.text for lock in locks))}
    assert len(hashes) >= len(pinned)


def test_its_images_are_built_of_the_commit(release: Release, built_here: list[str]) -> None:
    called = (release.programs / "buildah.log").read_text()
    builds = [line for line in called.splitlines() if line.startswith("build ")]
    assert len(builds) >= len(built_here)
    for line in builds:
        assert f"--build-arg REVISION={distributions.head(release.checkout)} " in f"{line} "
        assert f"--build-arg VERSION={VERSION} " in line
        assert not line.endswith(str(release.checkout)), "a checkout may have other files than the commit"


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_release_that_fails_leaves_the_one_before(release: Release, tmp_path: Path) -> None:
    """It leaves its own files beside them, which do not hinder the next."""
    first = contents(release.directory)
    done = release.make("--images", "none", "--key", str(tmp_path / "none"))
    assert done.returncode == 1
    assert "ssh-keygen" in done.stderr
    assert contents(release.directory) == first
    assert [*release.directory.with_name("release.partial").iterdir()]


def test_two_releases_of_a_commit_are_equal(release: Release, tmp_path: Path) -> None:
    """And without a key, this one says that it is not signed; without a builder of images, that they are left out."""
    first = contents(release.directory)
    shutil.copytree(release.directory, tmp_path / "kept")
    git = shutil.which("git")
    assert git is not None
    (tmp_path / "git").symlink_to(git)
    try:
        done = release.make("--images", "cpu", "--source", "https://example.com/lmi-handler", path=str(tmp_path))
        second = contents(release.directory)
    finally:
        shutil.rmtree(release.directory)
        shutil.copytree(tmp_path / "kept", release.directory)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "not signed: no key (KEY=FILE)\n"
        "left out: lmi-handler-cpu: neither buildah nor podman is on PATH\n"
        "left out: lmi-handler-cpu-arm64: neither buildah nor podman is on PATH\n"
    )
    distributed = {name for name in first if name.startswith("lmi_handler-")}
    assert second.keys() == {*distributed, provenance.PROVENANCE, "SHA256SUMS"}, "no image or signature of the first"
    assert {name: first[name] for name in distributed} == {name: second[name] for name in distributed}


def test_what_is_not_committed_is_no_release(release: Release) -> None:
    page = release.checkout / "README.md"
    text = page.read_text()
    page.write_text("changed")
    try:
        done = release.make("--images", "none")
    finally:
        page.write_text(text)
    assert (done.returncode, done.stderr) == (1, "commit these first: README.md\n")
    assert (release.directory / "SHA256SUMS").exists()


def test_a_directory_with_other_files_is_kept(release: Release, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    command = [sys.executable, "-m", "tests.release", str(tmp_path), "--tools", str(release.tools), "--images", "none"]
    done = subprocess.run(command, cwd=release.checkout, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, f"{tmp_path} has other files: mine\n")
    assert (tmp_path / "mine").exists()


WORKFLOWS = [ROOT / ".github" / "workflows" / f"{name}.yml" for name in ("release", "vulnerabilities")]


def steps(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, job in yaml.safe_load(path.read_text())["jobs"].items():
        yield from ((name, step) for step in job["steps"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_is_there(path: Path) -> None:
    """Its scripts are ones for bash, its targets those of the Makefile, its scans those of the policy."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    scans = []
    for _, step in steps(path):
        if "run" in step:
            script = re.sub(r"\$\{\{.*?\}\}", "x", step["run"])
            assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""
            assert {*re.findall(r"\bmake ([a-z-]+)", script)} <= {*targets}
        elif step["uses"].startswith("anchore/scan-action@"):
            scans.append(step["with"])
    assert scans
    assert all(scan["severity-cutoff"] == "high" and scan["only-fixed"] for scan in scans)


def test_what_a_scan_passes_over_has_a_reason_and_a_day() -> None:
    ignored = yaml.safe_load((ROOT / ".grype.yaml").read_text())["ignore"]
    assert [one for one in ignored if not re.match(r"\d{4}-\d\d-\d\d: \w", one.get("reason", ""))] == []


def test_only_the_job_that_a_person_lets_run_publishes() -> None:
    workflow = yaml.safe_load(WORKFLOWS[0].read_text())
    jobs = workflow["jobs"]
    assert workflow["permissions"] == {"contents": "read"}
    assert [name for name, job in jobs.items() if "environment" in job] == ["publish"]
    assert jobs["publish"]["if"] == "github.ref_type == 'tag'"
    assert {*jobs["publish"]["needs"]} == {*jobs} - {"publish"}
    assert [name for name, job in jobs.items() if job["permissions"]["contents"] == "write"] == ["publish"]
    assert jobs["image"]["strategy"]["matrix"]["target"] == [*containers.LOCKS]
    publishes = re.compile(r"skopeo|gh release|gh-action-pypi-publish")
    assert {name for name, step in steps(WORKFLOWS[0]) if publishes.search(json.dumps(step))} == {"publish"}


def test_an_image_of_another_architecture_needs_an_emulator(monkeypatch: pytest.MonkeyPatch, release: Release) -> None:
    monkeypatch.setenv("PATH", str(release.programs), prepend=os.pathsep)
    monkeypatch.setattr(containers, "_emulates", lambda architecture: False)
    foreign = "arm64" if os.uname().machine == "x86_64" else "amd64"
    assert containers.obstacle(containers.Image("cpu", foreign)).startswith(
        f"this machine runs no programs of {foreign}"
    )
    monkeypatch.setattr(containers, "_emulates", lambda architecture: True)
    assert containers.obstacle(containers.Image("cpu", foreign)) == ""
