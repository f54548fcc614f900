"""A user's model.py and requirements.txt next to the model."""

from __future__ import annotations

import ast
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
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from handler.config.config import Config
from handler.core import child_processes
from handler.core.errors import ConfigError, log_words
from handler.core.values import Role

log = logging.getLogger("handler.launch")

ENGINE_MODULES = ("djl_python.huggingface", "djl_python.tensorrt_llm", "djl_python.lmi_vllm", "djl_python.lmi_trtllm")
"""Modules whose `handle` is the engine's own answer, with those below them."""

_OWN_ENTRY = "handler.entry"
_FILE = "model.py"
_TRIED_FIRST = "djl_python.lmi_vllm"
_TRIED_SINCE = (0, 34)
_KEY, _ENGINE = "option.entryPoint", "option.llm_engine"


def role_of(config: Config, path: Path | None) -> Role:
    """Decide as LMI does: without an entry point model.py is it, and LMI's handler of vLLM tries the function first.

    An engine that the file or the command names by option.llm_engine is available to it like that handler.

    Args:
        path: the file; None if there is none.
    """
    tree = None if path is None else _parsed(path)
    if tree is None or not _has_handle(tree):
        return Role.NONE
    entry = config.settings.get(_KEY, "")
    if entry in ("", _FILE):
        origin = config.origins.get(_ENGINE, "")
        if _is_aws(config):  # whose image calls no such function
            return Role.NONE
        if origin and not origin.startswith("environment variable"):  # which an image may set
            return Role.FIRST
        return Role.ENTRY if _names_engine(tree) else Role.ALONE
    return Role.FIRST if entry.startswith(_TRIED_FIRST) and config.lmi_version >= _TRIED_SINCE else Role.NONE


def has_own_handle(path: Path) -> bool:
    """Return whether a file has a function `handle` that is not the engine's own."""
    tree = _parsed(path)
    return tree is not None and _has_handle(tree)


def unused_handle(config: Config, path: Path | None) -> str:
    """Return why a function `handle` of the file is not called; "" if it is called, or there is none."""
    if path is None or config.handle_role is not Role.NONE or not has_own_handle(path):
        return ""
    entry = config.settings.get(_KEY, "")
    if entry not in ("", _FILE):
        return f"{path}: handle is not called: {_KEY}={entry} does not call it"
    return f"{path}: handle is not called in AWS's vLLM image (SM_VLLM_*)" if _is_aws(config) else ""


def _is_aws(config: Config) -> bool:
    return config.origins.get(_ENGINE, "").startswith("environment variable SM_VLLM")


def describe_model_py(path: Path, config: Config) -> str:
    """Describe the functions of a file, and which of them are called."""
    if unused := unused_handle(config, path):
        return unused
    tree = _parsed(path)
    body = [] if tree is None else tree.body
    found = [] if config.handle_role is Role.NONE else [f"handle {config.handle_role.value}"]
    for kind in ("input_formatter", "output_formatter"):
        names = [node.name for node in body if isinstance(node, _FUNCTION) and _is_decorated(node, kind)]
        if names:
            what = f"{kind} {', '.join(names)}"
            found.append(f"{what} (not called beside handle)" if config.handle_role is Role.ALONE else what)
    return f"{path}: {'; '.join(found) or 'no handle, no formatter'}"


_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def _is_decorated(node: ast.FunctionDef | ast.AsyncFunctionDef, kind: str) -> bool:
    return any(ast.unparse(one).rpartition(".")[2] == kind for one in node.decorator_list)


def _parsed(path: Path) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the import shows them
            return ast.parse(path.read_bytes(), str(path))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None  # the check of its syntax says so


def _has_handle(tree: ast.Module) -> bool:
    """Return whether the file has a function of its own under the name; the last binding counts."""
    own = False
    for node in _statements(tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == "handle":
            own = True
        elif isinstance(node, ast.ImportFrom):
            if any((alias.asname or alias.name) == "handle" for alias in node.names):
                own = not _is_engines(node.module or "")
        elif isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "handle" for target in node.targets
        ):
            own = not _is_engines(ast.unparse(node.value).rpartition(".")[0])
    return own


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _statements([child for child in ast.walk(node) if isinstance(child, ast.stmt) and child != node])


def _names_engine(tree: ast.Module) -> bool:
    """Return whether the file imports one of LMI's handlers, perhaps within a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(_is_engines(alias.name) for alias in node.names):
            return True
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            if any(_is_engines(name) for name in names):
                return True
    return False


def _is_engines(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in (*ENGINE_MODULES, _OWN_ENTRY))


# -- requirements.txt: packages that are installed before anything of the model's is imported --------------------------


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
    """Return the requirements to install at startup; None if there is none, or `option.install_requirements` is false.

    Args:
        directory: the model directory.
        wanted: the option's value.
    """
    file = directory and directory / "requirements.txt"
    return file if file and wanted and file.is_file() else None


def install(file: Path, environ: Mapping[str, str] | None = None) -> None:
    """Install what the file names; wheels may be in `requirements/` next to it. A failure is logged, as in LMI.

    What it names runs code of its own here, as the model directory's model.py does.

    Args:
        environ: by default this process's. pip's own variables apply.

    Raises:
        ConfigError: `child_processes.stop_all` has ended it.
    """
    log.info("installing %s (%s=false skips this)", file, KEY)
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
    log.error("%s could not be installed; starting without it, as LMI does: %s", file, why)


def _reason(output: str, status: int) -> str:
    """Return what is wrong, in one line: pip's last error says the most."""
    found = _FAILURE.findall(output)
    said = log_words(found[-1]) if found else f"pip ended with status {status}"
    if said == "Exception:":  # pip's own traceback follows, whose last line says what it was
        said = log_words(output.rstrip().rpartition("\n")[2])
    if not _UNREACHABLE.search(output):
        return said
    cure = "build the packages into the image, or put wheels into requirements/"
    return f"no package index can be reached ({said}): {cure}"


def _see_new_packages() -> None:
    """Let this process import the new packages, also from the user's own directory, which may be new."""
    importlib.invalidate_caches()
    own = site.getusersitepackages()
    if site.ENABLE_USER_SITE and os.path.isdir(own) and own not in sys.path:
        site.addsitedir(own)
