"""Virtual environments for client libraries that cannot live in one with each other, or with us.

Each is built once under the cache directory, and again when its requirements or the Python change.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from handler.config.model_files import cache_directory
from tests import install

_HERE = Path(__file__).parent

_BARE = frozenset({"lm-eval"})
"""Installed without what they declare: lm-eval brings half a gigabyte that its model of an API never imports."""


def python(name: str, folder: Path = _HERE) -> Path:
    """The interpreter of the environment that requirements-{name}.txt in this folder describes."""
    requirements = folder / f"requirements-{name}.txt"
    key = hashlib.sha256(requirements.read_bytes() + f"{sys.version} {sys.base_prefix}".encode()).hexdigest()[:16]
    directory = built_once(
        cache_directory() / "venvs" / f"{name}-{key}",
        lambda directory: _build(directory, requirements, bare=name in _BARE),
    )
    return directory / "bin" / "python"


def built_once(directory: Path, build: Callable[[Path], object]) -> Path:
    """`directory`, which `build` fills where it is not there yet."""
    complete = directory / ".complete"
    with _alone(directory):
        if not complete.exists():
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            build(directory)
            complete.touch()  # last: what a killed run leaves behind is not taken for a finished one
    return directory


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Two test runs may want the same environment at the same time; one builds, the other waits for it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(directory: Path, requirements: Path, *, bare: bool) -> None:
    dependencies = ["--no-deps"] if bare else []
    install.environment(directory, "--only-binary=:all:", *dependencies, "-r", str(requirements))


def environments() -> list[str]:
    """The names of all."""
    return sorted(path.stem.removeprefix("requirements-") for path in _HERE.glob("requirements-*.txt"))
