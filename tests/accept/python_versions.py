"""Run half of the units and of the app on another Python: `python -m tests.accept.python_versions ENVIRONMENT 3.10`.

Processes of their own, whose arguments and signals few units see, run on the lowest one.

The environment is created if need be. That Python is on PATH, or pyenv has it, or else it is one of Debian's newest
suite, in a directory beside the environment (`debian.py`).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from tests import install
from tests.accept import debian
from tests.conftest import QUICK

ROOT = Path(__file__).parents[2]
SAME = (
    *("tests/unit/test_structure.py", "tests/unit/protocols/test_wire_document.py"),
    *("tests/unit/config/test_options_document.py", "tests/unit/config/test_migrating_document.py"),
)
"""What no version of Python changes: our own texts and imports, which `make test` reads."""

LEFT_TO_ANOTHER = {
    "3.10": tuple(f"tests/{name}" for name in ("unit/protocols", "unit/config", "unit/plugins", "app/dialects")),
    "3.14": (
        *(f"tests/unit/{name}" for name in ("engines", "serving", "core", "djl", "scheduler", "replay")),
        *(f"tests/app/{name}" for name in ("serving", "http", "security", "media", "moves")),
        *("tests/app/test_replicas.py", "tests/app/test_fuzz.py", "tests/app/dialects/test_openapi.py"),
        "tests/process",
    ),
}
"""The versions share the folders: what runs, engines and servers, on the lowest one; what reads, on the newest."""


def main(directory: Path, version: str, *options: str) -> int:
    python = environment(directory, version)
    left = (*SAME, *LEFT_TO_ANOTHER[version])
    missing = [path for path in left if not (ROOT / path).exists()]
    assert not missing, f"not there: {missing}"
    ignored = [f"--ignore={path}" for path in left]
    command = [*python, "-m", "pytest", *options, "-m", QUICK, "tests/unit", "tests/app", "tests/process", *ignored]
    return subprocess.run([*command, "--hypothesis-profile", "fewest"], cwd=ROOT).returncode


def environment(directory: Path, version: str) -> list[str]:
    """Return the command of an interpreter with all that tests need, installed once for each set of requirements."""
    directory, pins = directory.absolute(), install.pinned()
    python, root = interpreter(version), directory.with_name(f"{directory.name}-debian")
    if python is None:
        debian.make(root, version)
    enter = partial(debian.command, root) if python is None else install.here
    stamp = directory / ".installed"
    wanted = (ROOT / "pyproject.toml").read_text() + (install.PINS.read_text() if pins else "")
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"installing what tests need into {directory} ...", flush=True)
        packages = (*pins, "pip", "--editable", f"{ROOT}[cpu,dev]")
        install.environment(directory, *packages, python=python or f"python{version}", enter=enter)
        stamp.write_text(wanted)
    return enter(str(directory / "bin" / "python"))


def interpreter(version: str) -> str | None:
    """Return the interpreter itself, as uv cannot use what pyenv puts on PATH, or None if there is none."""
    name = f"python{version}"
    if shutil.which(name):
        done = subprocess.run([name, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True)
        if not done.returncode:
            return done.stdout.strip()
    if shutil.which("pyenv") is None:
        return None
    done = subprocess.run(["pyenv", "prefix", version], capture_output=True, text=True)
    return None if done.returncode else f"{done.stdout.strip()}/bin/python"


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), *sys.argv[2:]))
