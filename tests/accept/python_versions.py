"""Run half of the units and of the app on another Python: `python -m tests.accept.python_versions ENVIRONMENT 3.10`.

The environment is created if need be. That Python is on PATH, or pyenv has it, or else it is one of Debian's newest
suite, in a directory beside the environment (`debian.py`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

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
    ),
}
"""The versions share the folders: what runs, engines and servers, on the lowest one; what reads, on the newest."""


def main(directory: Path, version: str, *options: str) -> int:
    python = environment(directory, version)
    left = (*SAME, *LEFT_TO_ANOTHER[version])
    missing = [path for path in left if not (ROOT / path).exists()]
    assert not missing, f"not there: {missing}"
    ignored = [f"--ignore={path}" for path in left]
    command = [*python, "-m", "pytest", *options, "-m", QUICK, "tests/unit", "tests/app", *ignored]
    return subprocess.run([*command, "--hypothesis-profile", "fewest"], cwd=ROOT).returncode


def environment(directory: Path, version: str) -> list[str]:
    """Return the command of an interpreter with all that tests need, installed once for each pyproject.toml."""
    python, root = _found(version), directory.with_name(f"{directory.name}-debian").absolute()
    if python is None:
        debian.make(root, version)
    enter = partial(debian.command, root) if python is None else _here
    installed = str(directory.absolute() / "bin" / "python")
    stamp, wanted = directory / ".installed", (ROOT / "pyproject.toml").read_text()
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"installing what tests need into {directory} ...", flush=True)
        uv_install = (installed, "-m", "uv", "pip", "install", "--quiet", "--python", installed)
        for arguments in (
            (python or f"python{version}", "-m", "venv", "--clear", str(directory.absolute())),
            (installed, "-m", "pip", "install", "--quiet", "uv<1"),
            (*uv_install, *_PINNED, "pip", "--editable", f"{ROOT}[cpu,dev]"),
        ):
            subprocess.run(enter(*arguments), cwd=ROOT, check=True)
        stamp.write_text(wanted)
    return enter(installed)


_PINNED = () if os.environ.get("LATEST") else ("--constraint", ".ci/constraints.txt")


def _here(*arguments: str) -> list[str]:
    return [*arguments]


def _found(version: str) -> str | None:
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
