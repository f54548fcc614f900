"""What the GPU images install beside their engine: the Dockerfile's own command, on a stand-in of their bases."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path

import pytest

from tests import install
from tests.container.images.dockerfile import ROOT, read

split = runpy.run_path(str(ROOT / "docker" / "hold.py"))["split"]


def test_what_is_installed_stays_and_what_is_not_is_ours() -> None:
    installed = {"torch": "2.9.1+cu130", "prometheus_client": "0.22.1", "Starlette": "0.49.1"}
    pins = """\
# comment
orjson==3.13.0 \\
    --hash=sha256:aa \\
    --hash=sha256:ab
prometheus-client==0.26.0 \\
    --hash=sha256:ba
starlette==1.7.0 ; python_full_version < '3.11' \\
    --hash=sha256:ca
starlette==1.10.0 ; python_full_version >= '3.11' \\
    --hash=sha256:da
"""
    held, wanted = split(installed, pins, ["starlette"])
    assert held == ["prometheus_client==0.22.1", "torch==2.9.1+cu130"]
    assert wanted == [
        "orjson==3.13.0 \\\n    --hash=sha256:aa \\\n    --hash=sha256:ab",
        "starlette==1.7.0 ; python_full_version < '3.11' \\\n    --hash=sha256:ca",
        "starlette==1.10.0 ; python_full_version >= '3.11' \\\n    --hash=sha256:da",
    ]


def base(directory: Path, *packages: str) -> Path:
    """The Python of an image that brings `packages`."""
    return install.environment(directory, "pip", "setuptools", *packages)


def installing(stage: str, python: Path, scratch: Path) -> subprocess.CompletedProcess[str]:
    """Run what the stage runs to install, with `python` as python3."""
    [run] = [value for value in read()[1][stage].values("RUN") if "pip install" in value]
    command, _, _ = run.partition("&& rm ")
    places = {"/opt/lmi-handler": ROOT / "docker", "/tmp": scratch, "python3": python}
    pattern = rf"(?<=\s)({'|'.join(places)})(?=[/\s])"  # all at once: ROOT may be in /tmp
    command = re.sub(pattern, lambda match: str(places[match[1]]), f" {command}")
    return subprocess.run(["sh", "-euc", command], capture_output=True, text=True)


def versions(python: Path) -> dict[str, str]:
    command = [str(install.UV), "--quiet", "pip", "freeze", "--python", str(python)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return dict(line.split("==") for line in lines)


HELD = ("numpy==1.26.4", "prometheus-client==0.21.1", "idna==3.7")
MOVED = ("starlette==0.46.2", "uvicorn==0.34.0")


def test_the_base_s_packages_stay_and_ours_come_by_their_hashes(tmp_path: Path) -> None:
    python = base(tmp_path / "base", *HELD, *MOVED)
    before = versions(python)
    done = installing("trtllm", python, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    after = versions(python)
    assert {name for name in before if before[name] != after[name]} == {"starlette", "uvicorn"}
    pinned = set(re.findall(r"^(\S+)==(\S+) ", (ROOT / "docker" / "constraints-gpu.txt").read_text(), re.MULTILINE))
    added = {(name, version) for name, version in after.items() if before.get(name) != version}
    assert added <= pinned
    assert {"aiohttp", "yarl", "boto3", "soxr", "starlette"} <= {name for name, _ in added}


@pytest.mark.nightly
def test_where_the_base_has_what_ours_cannot_use_pip_names_both(tmp_path: Path) -> None:
    python = base(tmp_path / "base", "idna==2.7")
    before = versions(python)
    done = installing("trtllm", python, tmp_path)
    assert done.returncode != 0
    assert re.search(r"anyio 4\S+ depends on idna>=2\.8\n +The user requested \(constraint\) idna==2\.7", done.stdout)
    assert versions(python) == before


def test_both_images_install_alike() -> None:
    [trtllm, lmi] = [
        [value for value in read()[1][name].values("RUN") if "pip install" in value] for name in ("trtllm", "lmi")
    ]
    assert trtllm == lmi
