"""requirements.txt beside the model: packages that are installed before anything of the model's is imported."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
import shutil
import site
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from handler.core import child_processes
from handler.core.errors import ConfigError
from handler.core.words import log_words

log = logging.getLogger("handler.launch")

KEY = "option.install_requirements"

_UNREACHABLE = re.compile(
    r"connection broken by|NewConnectionError|ConnectTimeout|Temporary failure in name resolution|dns error|"
    r"Failed to fetch|error sending request",
)
_FAILURE = re.compile(r"^\s*(?:ERROR|error|×)[: ]+\s*(.+)$", re.MULTILINE)

_DEFAULTS = {
    "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_ROOT_USER_ACTION": "ignore",
    "PIP_RETRIES": "1",  # five, with 15 s each, would delay every start without a network by minutes
    "UV_HTTP_TIMEOUT": "15",
}  # fmt: skip


def requirements_file(directory: Path | None, *, wanted: bool) -> Path | None:
    """Return the file that a start installs; None where there is none, or `option.install_requirements` is false.

    Args:
        directory: the model directory.
        wanted: the option's value.
    """
    file = directory and directory / "requirements.txt"
    return file if file and wanted and file.is_file() else None


def install(file: Path, environ: Mapping[str, str] | None = None) -> None:
    """Install what the file names; wheels may lie in `requirements/` beside it. A failure is logged, as in LMI.

    What it names runs code of its own here, as the model directory's model.py does.

    Args:
        environ: by default this process's. pip's own variables are heeded.

    Raises:
        ConfigError: `child_processes.stop_all` has ended it.
    """
    log.info("installing %s (%s=false leaves it out)", file, KEY)
    began, environ = time.monotonic(), os.environ if environ is None else environ
    command = _command(file)
    if command is None:
        return _failed(file, "there is neither pip nor uv here")
    try:
        process = child_processes.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**_DEFAULTS, **environ}
        )
    except child_processes.Stopped:
        raise ConfigError(f"stopped while {file} was being installed") from None
    except OSError as error:
        return _failed(file, str(error))
    if process.returncode:
        return _failed(file, _reason(process.stdout.decode(errors="replace"), process.returncode))
    _see_new_packages()
    log.info("installed %s in %.1f s", file, time.monotonic() - began)


def _command(file: Path) -> list[str] | None:
    """Make the command of pip, or of uv where Python comes without pip; None without both."""
    wheels = file.parent / "requirements"
    what = ["install", "--quiet", "--requirement", str(file.absolute())]
    what += ["--find-links", str(wheels.absolute())] if wheels.is_dir() else []
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", *what]
    uv = shutil.which("uv")
    return (uv and [uv, "pip", what[0], "--python", sys.executable, *what[1:]]) or None


def _failed(file: Path, why: str) -> None:
    log.error("%s is not installed, and the start goes on without it, as in LMI: %s", file, why)


def _reason(output: str, status: int) -> str:
    """Return what is wrong, in one line: pip's last error says most."""
    found = _FAILURE.findall(output)
    said = log_words(found[-1]) if found else f"pip ended with status {status}"
    if said == "Exception:":  # pip's own traceback follows, whose last line says what it was
        said = log_words(output.rstrip().rpartition("\n")[2])
    if not _UNREACHABLE.search(output):
        return said
    cure = "build the packages into the image, or put wheels into requirements/"
    return f"no index of packages can be reached ({said}): {cure}"


def _see_new_packages() -> None:
    """Let this process import what has come, also from the user's own directory, which may be new."""
    importlib.invalidate_caches()
    own = site.getusersitepackages()
    if site.ENABLE_USER_SITE and os.path.isdir(own) and own not in sys.path:
        site.addsitedir(own)
