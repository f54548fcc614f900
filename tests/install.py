"""Installing by uv: the tests' own virtual environments, and what to do where an installation of the Makefile fails.

`make dev` installs uv beside this interpreter. `python -m tests.install COMMAND ...` runs a command of uv's or pip's,
and ends with its status.

The environments' bytecode is written as modules are imported, so PYTHONDONTWRITEBYTECODE must not be set, as in the
Makefile: `import vllm` takes 21 s then, in place of 9.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess

UV = Path(sys.executable).with_name("uv")
PINS = Path(__file__).parents[1] / ".ci/constraints.txt"


def pinned(file: Path = PINS) -> tuple[str, ...]:
    """The arguments for the versions that a file pins, by default those that `make` installs; with LATEST, none."""
    return () if os.environ.get("LATEST") else ("--constraint", str(file), "--build-constraint", str(file))


def here(*command: str) -> list[str]:
    """The command itself: `enter` of an environment on this system."""
    return [*command]


def environment(
    directory: Path, *arguments: str, python: str = sys.executable, enter: Callable[..., list[str]] = here
) -> Path:
    """Create a virtual environment of a Python, by default this one, and install into it.

    `arguments` are those of `uv pip install`. `enter` gives the command that runs one elsewhere, under the same paths.
    Returns the environment's interpreter; raises `RuntimeError` with uv's output where the installation fails.
    """
    _uv(enter, "venv", "--clear", "--python", python, str(directory))
    installed = directory / "bin" / "python"
    _uv(enter, "pip", "install", "--python", str(installed), *arguments)
    return installed


def packages(*arguments: str) -> None:
    """Run `uv pip install` with `arguments`."""
    _uv(here, "pip", "install", *arguments)


def compiled(*arguments: str) -> None:
    """Run `uv pip compile` with `arguments`."""
    _uv(here, "pip", "compile", *arguments)


def _uv(enter: Callable[..., list[str]], *arguments: str) -> None:
    command = enter(str(UV), "--quiet", *arguments)
    done = _run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        said = f"{done.stdout[-4000:]}{advice(done.stdout)}"
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{said}")


def main(*command: str) -> int:
    done = _run(command, stderr=subprocess.PIPE)
    sys.stderr.write(done.stderr)
    if done.returncode:
        sys.stderr.write(advice(done.stderr))
    return done.returncode


def _run(command: Sequence[str], stdout: int | None = None, stderr: int = subprocess.PIPE) -> CompletedProcess[str]:
    unwrapped = {**os.environ, "UV_NO_WRAP": "1"}  # for `advice`
    return subprocess.run(command, stdout=stdout, stderr=stderr, text=True, env=unwrapped)


_NAME = r"([A-Za-z0-9][\w.-]*)"
_UNREACHABLE = (r"client error \(Connect\)", r"connection broken by")  # uv's; pip's, which then finds nothing
_HIDDEN = (rf"`{_NAME}` was filtered by `exclude-newer`",)
_LACKING = (
    rf"there is no version of {_NAME}==",
    rf"{_NAME} was not found in the",  # "package registry", "provided package locations"
    rf"No matching distribution found for {_NAME}==",  # pip's
)
_WITHOUT_WHEEL = (rf"{_NAME}==\S+ has no (?:usable )?wheels", rf"Failed to build `{_NAME}==")
_OTHER_FILE = (rf"Hash mismatch for `{_NAME}==", rf"DO NOT MATCH THE HASHES.*\n +{_NAME}==")


def advice(said: str) -> str:
    """A line that names the package which uv or pip could not install, and what to do, or "" where that is unknown."""
    if _first(_UNREACHABLE, said):
        return "the index does not answer: UV_DEFAULT_INDEX names another one to uv, PIP_INDEX_URL to pip\n"
    system = " ".join(filter(None, (platform.system(), platform.machine(), *platform.libc_ver())))
    for patterns, fault, remedy in (
        (_HIDDEN, "UV_EXCLUDE_NEWER hides {}", "unset it"),
        (_LACKING, "this index lacks {}", "ask for it at your mirror"),
        (
            _WITHOUT_WHEEL,
            f"this index has no wheel of {{}} for Python {platform.python_version()} on {system}",
            "try another Python (`make PYTHON=python3.12 ...`)",
        ),
    ):
        if name := _first(patterns, said):
            pin, ours = _pin(name, said)
            source, newest = (_OF_MAKE, _NEWEST) if ours else ("", "")
            return f"{fault.format(pin)}{source}: {remedy}{newest}\n"
    if name := _first(_OTHER_FILE, said):
        pin, _ = _pin(name, said)
        return f"this index has another file for {pin} than the one that was tested: ask for that at your mirror\n"
    return ""


_OF_MAKE = ", which .ci/constraints.txt pins"
_NEWEST = ", or take the newest versions: `make LATEST=1 ...`"


def _first(patterns: Sequence[str], said: str) -> str:
    """What the first pattern that fits has found."""
    return next((found[found.lastindex or 0] for found in (re.search(one, said) for one in patterns) if found), "")


def _pin(name: str, said: str) -> tuple[str, bool]:
    """The version that was wanted, and whether it is one of those that `make` wants."""
    wanted = re.search(rf"(?<![\w.-]){re.escape(name)}(?:\{{[^}}]*\}})?==([\w.+!-]*\w)", said)
    pin = f"{name}=={wanted[1]}" if wanted else name
    return pin, bool(pinned()) and re.search(rf"^{re.escape(pin)} ", PINS.read_text(), re.MULTILINE) is not None


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
