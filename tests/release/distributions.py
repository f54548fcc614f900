"""The source distribution and the wheel of a commit: `python -m tests.release.distributions DIRECTORY [ARGUMENT ...]`.

Two builds of a commit are equal, byte for byte, with any umask. They are made of a copy of the commit, so what else
lies in the checkout does not count. `handler/commit.txt` has the commit's id in both. `uv build` gets the ARGUMENTS.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

from tests.install import UV

ROOT = Path(__file__).parents[2]
SOURCES = ("handler", "deploy", "proof", "lmi_handler.py", "LICENSE", "README.md", "pyproject.toml", ".gitignore")
COMMIT = "handler/commit.txt"


def git(checkout: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=checkout, check=True, stdout=subprocess.PIPE).stdout


def head(checkout: Path) -> str:
    """Return the id of the commit that is checked out."""
    return git(checkout, "rev-parse", "HEAD").decode().strip()


def changed(checkout: Path) -> list[str]:
    """Return the tracked files that differ from the commit."""
    return git(checkout, "diff", "--name-only", "HEAD").decode().splitlines()


def extract(archive: tarfile.TarFile, into: Path) -> None:
    """Extract git's archive with its file modes. Early releases of Python 3.10 and 3.11 do not support filters."""
    archive.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
    archive.extractall(into)


def epoch(checkout: Path) -> int:
    """Return the commit's time in seconds since 1970."""
    return int(git(checkout, "log", "-1", "--format=%ct").decode())


def build(checkout: Path, into: Path, *arguments: str) -> list[Path]:
    """Build both distributions of the commit that is checked out, and return their paths: the wheel's first.

    Args:
        checkout: a clone with git's files.
        into: the directory for both, which is emptied of earlier distributions.
        arguments: of `uv build`.

    Raises:
        subprocess.CalledProcessError: if git or uv fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, "source")
        with tarfile.open(fileobj=BytesIO(git(checkout, "archive", "HEAD", *SOURCES))) as archive:
            extract(archive, copy)
        (copy / COMMIT).write_text(head(checkout) + "\n")
        environ = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch(checkout))}
        into.mkdir(parents=True, exist_ok=True)
        for earlier in (*into.glob("*.whl"), *into.glob("*.tar.gz")):
            earlier.unlink()
        command = [str(UV), "build", "--quiet", "--no-create-gitignore", "--python", sys.executable, *arguments]
        command += ["--out-dir", str(into.resolve()), str(copy)]
        subprocess.run(command, check=True, env=environ)
    return [*into.glob("*.whl"), *into.glob("*.tar.gz")]


def main(directory: str, *arguments: str) -> int:
    if changed(ROOT):
        print("not in the distributions: what is not committed", file=sys.stderr)
    for path in build(ROOT, Path(directory), *arguments):
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
