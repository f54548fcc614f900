"""The Python environment of all workers: it has the imports of every compared handler."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from handler.config.model_files import cache_directory

_REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def worker_python() -> Path:
    """Made once, in the cache: upstream's packages, and behind them this interpreter's, with our handler."""
    key = hashlib.sha256(_REQUIREMENTS.read_bytes() + f"{sys.version} {sys.prefix}".encode()).hexdigest()[:16]
    directory = cache_directory() / "venvs" / f"djl-bench-{key}"
    python = directory / "bin" / "python"
    complete = directory / ".complete"
    if not complete.exists():
        print("making an environment with upstream's packages ...", file=sys.stderr, flush=True)
        _run([sys.executable, "-m", "venv", "--clear", str(directory)])
        _run([str(python), "-m", "pip", "install", "--quiet", "--only-binary=:all:", "-r", str(_REQUIREMENTS)])
        _add_packages(directory, Path(sysconfig.get_path("purelib")))
        complete.touch()  # last: what a killed run leaves behind is not taken for a finished one
    return python


def _add_packages(directory: Path, packages: Path) -> None:
    (site,) = directory.glob("lib/python*/site-packages")
    # not the bare path: then an editable install in it, a .pth file itself, would not be followed
    (site / "behind.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
