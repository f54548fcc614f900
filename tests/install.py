"""The tests' own virtual environments, created and filled by uv, which `make dev` installs beside this interpreter.

Their bytecode is written as modules are imported, so PYTHONDONTWRITEBYTECODE must not be set, as in the Makefile:
`import vllm` takes 21 s then, in place of 9.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

UV = Path(sys.executable).with_name("uv")


def environment(directory: Path, *arguments: str, python: str = sys.executable) -> Path:
    """Create a virtual environment of a Python, by default this one, and install into it.

    `arguments` are those of `uv pip install`. Returns the environment's interpreter; raises `RuntimeError` with uv's
    output where the installation fails.
    """
    _uv("venv", "--clear", "--python", python, str(directory))
    installed = directory / "bin" / "python"
    packages("--python", str(installed), *arguments)
    return installed


def packages(*arguments: str) -> None:
    """Run `uv pip install` with `arguments`."""
    _uv("pip", "install", *arguments)


def _uv(*arguments: str) -> None:
    command = [str(UV), "--quiet", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout[-4000:]}")
