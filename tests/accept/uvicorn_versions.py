"""Run the HTTP tests on the lowest and the newest uvicorn that pyproject.toml allows: it creates our connections.

`python -m tests.accept.uvicorn_versions DIRECTORY` installs each version into a folder of DIRECTORY, which comes first
on the path of the tests and of the servers that they start. The environment itself stays as it is; its own version is
that of `make test`, and not run again.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from tests import install

ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/unit/http",
    "tests/app/http",
    "tests/app/test_http.py",
    "tests/app/security",
    "tests/process/http/test_connections.py",
)


def main(directory: Path) -> None:
    lowest, bounds = requirement((ROOT / "pyproject.toml").read_text())
    for name, wanted in (("lowest", f"uvicorn=={lowest}"), ("newest", f"uvicorn{bounds}")):
        target = directory / name
        install.packages("--python", sys.executable, "--upgrade", "--target", str(target), wanted)
        environment = {**os.environ, "PYTHONPATH": str(target)}
        version, file = _run("-c", _VERSION, env=environment, capture=True).split(" ", 1)
        if not Path(file).is_relative_to(target) or (name == "lowest" and version != lowest):
            sys.exit(f"the tests would run on uvicorn {version} in {file}")
        if version == metadata.version("uvicorn"):
            print(f"uvicorn {version} is this environment's own: `make test` runs the HTTP tests on it", flush=True)
            continue
        print(f"the HTTP tests on uvicorn {version}", flush=True)
        _run("pytest", "-q", "-n", "2", "--dist", "loadfile", *TESTS, env=environment)


_VERSION = "import uvicorn; print(uvicorn.__version__, uvicorn.__file__)"


def requirement(pyproject: str) -> tuple[str, str]:
    """The lowest version, and all bounds as pip takes them."""
    found = re.search(r'"uvicorn(>=([0-9.]+),<[0-9.]+)"', pyproject)
    assert found is not None, "pyproject.toml names no bounds of uvicorn"
    return f"{found[2]}.0" if found[2].count(".") == 1 else found[2], found[1]


def _run(*arguments: str, env: dict[str, str] | None = None, capture: bool = False) -> str:
    module = () if arguments[0] == "-c" else ("-m",)
    command = [sys.executable, *module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE if capture else None)
    if done.returncode:
        sys.exit(done.returncode)
    return (done.stdout or "").strip()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
