"""Run half of the units and of the app on another Python: `python -m tests.accept.python_versions ENVIRONMENT 3.10`.

The environment is created if need be. That Python is on PATH, or pyenv has it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests import install
from tests.conftest import QUICK

ROOT = Path(__file__).parents[2]
SAME = (
    *("tests/unit/test_structure.py", "tests/unit/protocols/test_wire_document.py"),
    *("tests/unit/config/test_options_document.py", "tests/unit/config/test_migrating_document.py"),
)
"""What no version of Python changes: our own texts and imports, which `make test` reads."""

LEFT_TO_ANOTHER = {
    "3.10": tuple(f"tests/{name}" for name in ("unit/protocols", "unit/config", "unit/plugins", "app/dialects")),
    "3.13": (
        *(f"tests/unit/{name}" for name in ("engines", "serving", "core", "djl", "scheduler", "replay")),
        *(f"tests/app/{name}" for name in ("serving", "http", "security", "media", "moves")),
        *("tests/app/test_replicas.py", "tests/app/test_fuzz.py", "tests/app/dialects/test_openapi.py"),
    ),
}
"""The versions share the folders: what runs, engines and servers, on the lowest one; what reads, on the newest."""


def main(directory: Path, version: str, *options: str) -> int:
    python = str(environment(directory, version))
    left = (*SAME, *LEFT_TO_ANOTHER[version])
    missing = [path for path in left if not (ROOT / path).exists()]
    assert not missing, f"not there: {missing}"
    ignored = [f"--ignore={path}" for path in left]
    command = [python, "-m", "pytest", *options, "-m", QUICK, "tests/unit", "tests/app", *ignored]
    return subprocess.run([*command, "--hypothesis-profile", "fewest"], cwd=ROOT).returncode


def environment(directory: Path, version: str) -> Path:
    """Return the interpreter of an environment with all that tests need, created once for each pyproject.toml."""
    stamp, wanted = directory / ".installed", (ROOT / "pyproject.toml").read_text()
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"installing what tests need into {directory} ...", flush=True)
        install.environment(directory, "pip", "--editable", f"{ROOT}[cpu,dev]", python=_found(version))
        stamp.write_text(wanted)
    return directory / "bin" / "python"


def _found(version: str) -> str:
    """Return the interpreter itself: uv cannot use what pyenv puts on PATH."""
    name = f"python{version}"
    asked = [name, "-c", "import sys; print(sys.executable)"]
    if shutil.which(name):
        done = subprocess.run(asked, capture_output=True, text=True)
        if not done.returncode:
            return done.stdout.strip()
    done = subprocess.run(["pyenv", "prefix", version], stdout=subprocess.PIPE, text=True, check=True)
    return f"{done.stdout.strip()}/bin/python"


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), *sys.argv[2:]))
