"""The user's model.py and requirements.txt in the model directory."""

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
from handler.config.options import images
from handler.core import child_processes
from handler.core.errors import ConfigError, Problem, log_words
from handler.core.framing import FRAMINGS
from handler.core.user_functions import Role, imports

log = logging.getLogger("handler.launch")

ENGINE_MODULES = ("djl_python.huggingface", "djl_python.tensorrt_llm", "djl_python.lmi_vllm", "djl_python.lmi_trtllm")
"""Packages and modules with a `handle` function that passes requests to the engine."""

_ENTRY_OF_USER = "handler.entry"
_FILE = "model.py"
_TRIED_FIRST = "djl_python.lmi_vllm"
_TRIED_SINCE = (0, 34)
_KEY, _ENGINE = "option.entryPoint", "option.llm_engine"


def role_of(config: Config, path: Path | None) -> Role:
    """Return how an embedded server uses the function `handle` of a model.py, according to the rules of LMI.

    A model.py is the entry point if option.entryPoint is not set. The LMI handler for vLLM calls the function first,
    and passes the request to the engine only if the function returns None. Without option.entryPoint, this is also the
    case if serving.properties or the command sets option.llm_engine.

    Args:
        config: the configuration.
        path: the path of the model.py, or None if there is none.
    """
    tree = None if path is None else _parsed(path)
    if tree is None or not _has_handle(tree):
        return Role.NONE
    entry = config.settings.get(_KEY, "")
    if entry in ("", _FILE):
        origin = config.origins.get(_ENGINE, "")
        if _is_aws(config):
            return Role.NONE
        if origin and not origin.startswith("environment variable"):  # an image may set the variable
            return Role.FIRST
        names_engine = any(_is_engines(f"{module}.{name}") for _, module, name in imports(ast.walk(tree)))
        return Role.ENTRY if names_engine else Role.ALONE
    return Role.FIRST if entry.startswith(_TRIED_FIRST) and config.lmi_version >= _TRIED_SINCE else Role.NONE


def defines_handle(path: Path) -> bool:
    """Return whether a file defines a `handle` function that does not come from LMI."""
    tree = _parsed(path)
    return tree is not None and _has_handle(tree)


def unused_handle(config: Config, path: Path | None) -> str:
    """Return the reason why `handle` in a file is not called, or "" if it is called or does not exist."""
    if path is None or config.handle_role is not Role.NONE or not defines_handle(path):
        return ""
    entry = config.settings.get(_KEY, "")
    if entry not in ("", _FILE):
        return f"{path}: handle is not called, because {_KEY} is {entry}"
    return f"{path}: handle is not called in AWS's images (SM_*)" if _is_aws(config) else ""


def _is_aws(config: Config) -> bool:
    """Return whether variables of AWS's images select the engine. These images do not call `handle`."""
    return config.origins.get(_ENGINE, "").startswith(tuple(f"environment variable {name}" for name in images.ALL))


def describe_model_py(path: Path, config: Config) -> str:
    """Describe which functions of a model.py are called and which are not."""
    if unused := unused_handle(config, path):
        return unused
    tree = _parsed(path)
    body = [] if tree is None else tree.body
    parts = [] if config.handle_role is Role.NONE else [f"handle {config.handle_role.value}"]
    for kind in ("input_formatter", "output_formatter"):
        names = [node.name for node in body if isinstance(node, _FUNCTION) and _is_decorated(node, kind)]
        if names:
            idle = " (not called, because handle is)" if config.handle_role is Role.ALONE else ""
            parts.append(f"{kind} {', '.join(names)}{idle}")
    return f"{path}: {'; '.join(parts) or 'no handle and no formatters'}"


def missing_formatters(path: Path | None, config: Config) -> Iterator[Problem]:
    """Yield a problem for each option whose value is the name of a formatter that does not occur in model.py.

    The user code is not run. Names that exist in the file but are not formatters are reported only at startup.
    """
    tree = ast.Module([], []) if path is None else _parsed(path)
    bound = set() if tree is None else _bound(tree)
    if tree is None or "*" in bound:
        return
    for kind, name in (("input", config.input_formatter), ("output", config.output_formatter)):
        key = f"option.{kind}_formatter"
        if name is not None and name not in FRAMINGS and name not in bound:
            message = f"must be the name of an @{kind}_formatter function of model.py"
            lack = "there is no model.py" if path is None else f"it is not in {path}"
            yield Problem(config.where(key), key, f"{key}={name}: {message}; {lack}")


def _bound(tree: ast.Module) -> set[str]:
    """Return all names that a file binds in any scope."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def _is_decorated(node: ast.FunctionDef | ast.AsyncFunctionDef, kind: str) -> bool:
    return any(ast.unparse(decorator).rpartition(".")[2] == kind for decorator in node.decorator_list)


def _parsed(path: Path) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the import shows the warnings
            return ast.parse(path.read_bytes(), str(path))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None  # the check of the syntax reports it


def _has_handle(tree: ast.Module) -> bool:
    """Return whether the last binding of `handle` is a function of the user."""
    is_users = False
    for node in _statements(tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == "handle":
            is_users = True
        elif isinstance(node, ast.ImportFrom):
            if any((alias.asname or alias.name) == "handle" for alias in node.names):
                is_users = not _is_engines(node.module or "")
        elif isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "handle" for target in node.targets
        ):
            is_users = not _is_engines(ast.unparse(node.value).rpartition(".")[0])
    return is_users


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _statements([child for child in ast.walk(node) if isinstance(child, ast.stmt) and child != node])


def _is_engines(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in (*ENGINE_MODULES, _ENTRY_OF_USER))


# -- requirements.txt: packages that are installed before model.py is imported -----------------------------------------


KEY = "option.install_requirements"

_UNREACHABLE = re.compile(
    r"connection broken by|NewConnectionError|ConnectTimeout|Temporary failure in name resolution|dns error|"
    r"Failed to fetch|error sending request",
)
_FAILURE = re.compile(r"^\s*(?:ERROR|error|×)[: ]+\s*(.+)$", re.MULTILINE)

_DEFAULTS = {
    "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_ROOT_USER_ACTION": "ignore",
    "PIP_RETRIES": "1",  # the default of five, with 15 s each, would delay a start without network by minutes
    "UV_HTTP_TIMEOUT": "15",
}  # fmt: skip


def requirements_file(directory: Path | None, *, is_enabled: bool) -> Path | None:
    """Return the requirements.txt to install at startup, or None if it does not exist or the option is false.

    Args:
        directory: the model directory, or None.
        is_enabled: whether option.install_requirements is true.
    """
    file = directory and directory / "requirements.txt"
    return file if file and is_enabled and file.is_file() else None


def install(file: Path, environ: Mapping[str, str] | None = None) -> None:
    """Install the packages in a requirements.txt. As in LMI, a failure is only logged.

    Wheels may be in the directory `requirements` next to the file. Installing a package may run code, so the file must
    be trusted as much as model.py.

    Args:
        file: the path of the requirements.txt.
        environ: the environment of the installer. The default is that of this process. Environment variables of pip
            apply.

    Raises:
        ConfigError: if `child_processes.stop_all` stops the installation.
    """
    log.info("installing %s (%s=false skips this)", file, KEY)
    began, environ = time.monotonic(), os.environ if environ is None else environ
    command = _command(file)
    if command is None:
        return _failed(file, "neither pip nor uv is installed")
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
    """Return the command to run pip, or uv if pip is not installed, or None if neither is installed."""
    wheels = file.parent / "requirements"
    arguments = ["install", "--quiet", "--requirement", str(file.absolute())]
    arguments += ["--find-links", str(wheels.absolute())] if wheels.is_dir() else []
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", *arguments]
    uv = shutil.which("uv")
    return (uv and [uv, "pip", arguments[0], "--python", sys.executable, *arguments[1:]]) or None


def _failed(file: Path, reason: str) -> None:
    log.error("%s could not be installed; starting without it, as LMI does: %s", file, reason)


def _reason(output: str, status: int) -> str:
    """Return the reason for a failure on one line: the last error of pip, which is the most specific."""
    failures = _FAILURE.findall(output)
    reason = log_words(failures[-1]) if failures else f"the installer exited with status {status}"
    if reason == "Exception:":  # pip's traceback follows, whose last line names the exception
        reason = log_words(output.rstrip().rpartition("\n")[2])
    if not _UNREACHABLE.search(output):
        return reason
    cure = "build the packages into the image, or put wheels into requirements/"
    return f"no package index can be reached ({reason}): {cure}"


def _see_new_packages() -> None:
    """Make new packages importable in this process, even if pip has just created the user site directory."""
    importlib.invalidate_caches()
    packages = site.getusersitepackages()
    if site.ENABLE_USER_SITE and os.path.isdir(packages) and packages not in sys.path:
        site.addsitedir(packages)
