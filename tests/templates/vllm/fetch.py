"""Fetches vLLM's source, and records its tests' answers: `python -m tests.templates.vllm.fetch DIRECTORY`."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path

VERSION = "0.33.0"
PACKAGES = ("openai==3.54.0", "partial-json-parser==0.2.1.1.post7", "cohere-melody==0.15.3")
"""What vLLM's parsers import of others and cannot do without."""

PARTS = re.compile(
    r"[^/]+/(?:(?:vllm|tests)/(?:(?:tool_parsers|reasoning|parser)/.*\.py|__init__\.py)|examples/tool_chat_template_.*)"
)
SOURCE = re.compile(r'^sdist = \{ url = "([^"]+)".*?sha256 = "([0-9a-f]{64})"', re.MULTILINE)


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    sources, whole = directory / "vllm", directory / "vllm-source"
    shutil.rmtree(sources, ignore_errors=True)
    shutil.rmtree(whole, ignore_errors=True)
    archive = _download(directory)
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.partition("/")[2]
            homes = [sources] if PARTS.fullmatch(member.name) else []
            homes += [whole] if name.startswith("vllm/") and name.endswith(".py") else []
            file = tar.extractfile(member) if member.isfile() and homes else None
            data = file.read() if file is not None else b""
            for target in (home / name for home in homes if file is not None):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
    archive.unlink()
    (sources / "vllm/__init__.py").unlink(missing_ok=True)  # a stub stands for it
    site = sources / "site"
    _uv("pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "--target", str(site), *PACKAGES)
    _record(sources, site, directory / "vllm.jsonl")


def _download(directory: Path) -> Path:
    """Fetch the archive from the index that uv is set up for. Only its address is asked: pip would build it."""
    listed = _uv("pip", "compile", "--quiet", "--no-deps", "--format", "pylock.toml", "-", given=f"vllm=={VERSION}")
    found = SOURCE.search(listed)
    assert found is not None, f"no source distribution of vLLM {VERSION} in:\n{listed}"
    data = urllib.request.urlopen(found[1], timeout=120).read()
    assert hashlib.sha256(data).hexdigest() == found[2], "the archive has another checksum than the index says"
    archive = directory / "vllm.tar.gz"
    archive.write_bytes(data)
    return archive


def _uv(*arguments: str, given: str = "") -> str:
    command = [str(Path(sys.executable).with_name("uv")), *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout


def _record(sources: Path, site: Path, cases: Path) -> None:
    plugin = Path(__file__).parent
    environment = {
        **os.environ,
        "RECORDED": str(cases.resolve()),
        "PYTHONPATH": os.pathsep.join([str(sources.resolve()), str(plugin), str(site.resolve())]),
        "PYTHONHASHSEED": "0",
    }
    command = [
        *(sys.executable, "-m", "pytest", "-p", "record", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull),
        *("-q", "--tb=no", "--rootdir", ".", "-o", "asyncio_mode=auto", "--continue-on-collection-errors"),
        *(
            "tests/tool_parsers",
            "tests/reasoning",
            "tests/parser",
            "-k",
            "not plamo3 and not structural_tag and not beam",
        ),
    ]
    run = subprocess.run(command, cwd=sources, env=environment, capture_output=True, text=True)
    # 1: some of vLLM's tests fail on stubs, which does not count.
    assert run.returncode in (0, 1), f"{run.stdout[-2000:]}\n{run.stderr[-2000:]}"
    print(run.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
