"""Software bills of materials in CycloneDX's JSON, made of the pinned versions by cyclonedx-bom (OWASP's own tool).

The tool has an environment of its own, of docker/constraints-bill.txt, whose packages are checked by their hashes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.install import compiled, environment, packages
from tests.release.distributions import ROOT

PYTHON = "3.11"
"""Debian 12's, which the images have."""

LOCK = ".ci/constraints.txt"
_TOOL = "docker/constraints-bill.txt"
_MACHINES = {"amd64": "x86_64-manylinux_2_36", "arm64": "aarch64-manylinux_2_36"}


class Subject(NamedTuple):
    """What a bill is of. `sha256` is the digest of its file."""

    type: str
    name: str
    version: str
    purl: str
    sha256: str


def tool(directory: Path) -> Path:
    """Return the interpreter of the tool's environment in a directory, which is installed if it is not there.

    What an environment of an earlier release lacks is installed too.
    """
    python, needed = directory / "bin" / "python", ("--require-hashes", "--requirement", str(ROOT / _TOOL))
    if python.exists():
        packages("--python", str(python), "--only-binary", ":all:", *needed)
    else:
        environment(directory, "--compile-bytecode", "--only-binary", ":all:", *needed)
    return python


def pins(checkout: Path, locks: Sequence[str], architecture: str) -> str:
    """Return the pins, with their hashes, that files list for Debian 12 on an architecture (amd64, arm64)."""
    files = [checkout / lock for lock in locks]
    return _with_hashes(_compiled(architecture, "--no-deps", *map(str, files)), files)


def pins_of_extra(checkout: Path, extra: str, architecture: str = "amd64") -> str:
    """Return the pins that `pip install 'lmi-handler[EXTRA]'` takes with the versions of LOCK as constraints."""
    lock = checkout / LOCK
    project = str(checkout / "pyproject.toml")
    return _with_hashes(_compiled(architecture, "--constraint", str(lock), "--extra", extra, project), [lock])


def _compiled(architecture: str, *arguments: str) -> list[str]:
    """Return the pins, such as `numpy==2.4.6`."""
    where = ["--python", sys.executable, "--python-version", PYTHON, "--python-platform", _MACHINES[architecture]]
    quiet = ["--no-annotate", "--no-header", "--no-emit-index-url"]
    with tempfile.TemporaryDirectory() as scratch:
        found = Path(scratch, "pins.txt")
        compiled(*where, *quiet, "--output-file", str(found), *arguments)
        return found.read_text().splitlines()


def _with_hashes(pins: Iterable[str], locks: Iterable[Path]) -> str:
    """Return pins with the hashes that files have for them: an index may have further files of a version by now."""
    hashes: dict[str, str] = {}
    for lock in locks:
        hashes |= re.findall(r"^([\w.-]+==\S+).*(\\(?:\n +--hash=\S+(?: \\)?)+)$", lock.read_text(), re.MULTILINE)
    return "".join(f"{pin} {hashes[pin]}\n" for pin in pins)


def made(python: Path, checkout: Path, requirements: str) -> dict[str, Any]:
    """Return the bill of pins. Two bills of the same pins are equal.

    Args:
        python: the tool's interpreter.
        checkout: the checkout, for pyproject.toml.
        requirements: the pins.

    Raises:
        subprocess.CalledProcessError: if the tool fails, or its own check of the bill.
    """
    with tempfile.TemporaryDirectory() as scratch:
        listed, found = Path(scratch, "requirements.txt"), Path(scratch, "bill.json")
        listed.write_text(requirements)
        command = [str(python), "-W", "ignore", "-m", "cyclonedx_py", "requirements", str(listed)]
        command += ["--pyproject", str(checkout / "pyproject.toml"), "--output-reproducible"]
        command += ["--spec-version", "1.6", "--output-format", "JSON", "--output-file", str(found)]
        environ = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
        subprocess.run(command, check=True, env=environ)
        bill: dict[str, Any] = json.loads(found.read_text())
        return bill


def write(path: Path, bill: Mapping[str, Any], subject: Subject, more: Sequence[Mapping[str, Any]] = ()) -> None:
    """Write a bill for a subject, with further components, such as an image's Debian packages."""
    root = {name: value for name, value in subject._asdict().items() if name != "sha256"}
    root |= {"hashes": [{"alg": "SHA-256", "content": subject.sha256}]}
    metadata = {**bill["metadata"], "component": bill["metadata"]["component"] | root}
    whole = {**bill, "metadata": metadata, "components": [*bill["components"], *more]}
    path.write_text(json.dumps(whole, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
