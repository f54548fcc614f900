"""Virtual environments for client libraries that cannot live in one with each other, or with us.

Each is built once under the cache directory, and again when its requirements or the Python change. `python -m
tests.clients.venvs` builds them all.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from handler.models import cache_directory

_HERE = Path(__file__).parent


def python(name: str, directory: Path = _HERE) -> Path:
    """The interpreter of the environment that requirements-{name}.txt in this directory describes."""
    requirements = directory / f"requirements-{name}.txt"
    key = hashlib.sha256(requirements.read_bytes() + f"{sys.version} {sys.base_prefix}".encode()).hexdigest()[:16]
    environment = cache_directory() / "venvs" / f"{name}-{key}"
    complete = environment / ".complete"
    with _alone(environment):
        if not complete.exists():
            _build(environment, requirements)
            complete.touch()  # last: what a killed run leaves behind is not taken for a finished one
    return environment / "bin" / "python"


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Two test runs may want the same environment at the same time; one builds, the other waits for it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(directory: Path, requirements: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(directory))
    pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    _run(*pip, "--only-binary=:all:", "-r", str(requirements))


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert not done.returncode, f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout[-4000:]}"


if __name__ == "__main__":
    for path in sorted(_HERE.glob("requirements-*.txt")):
        print(python(path.stem.removeprefix("requirements-")), flush=True)
