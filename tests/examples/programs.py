"""The examples' folders, and ways to run or import one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from tests.environment import clean_environment
from tests.servers import PATIENCE

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
APPLICATIONS = EXAMPLES / "applications"


def run(program: Path, *arguments: object, python: str = sys.executable, **variables: str) -> str:
    """Run a program to its end, which must be a success; return what it prints."""
    done = finished(program, *arguments, python=python, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def finished(
    program: Path, *arguments: object, python: str = sys.executable, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, whatever its status: the first import of its libraries may take long."""
    command = [python, str(program), *map(str, arguments)]
    environment = {**clean_environment(), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2.5 * PATIENCE)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def load(program: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(program.stem, program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
