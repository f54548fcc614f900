"""What the `handle` function of a user's model.py is to the server, by the file's text; nothing of it runs."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

from handler.config.config import Config
from handler.core.custom_handlers import Role

ENGINE_MODULES = ("djl_python.huggingface", "djl_python.tensorrt_llm", "djl_python.lmi_vllm", "djl_python.lmi_trtllm")
"""Modules whose `handle` is the engine's own answer, with those below them."""

_OWN_ENTRY = "handler.entry"
_FILE = "model.py"
_TRIED_FIRST = "djl_python.lmi_vllm"
_TRIED_SINCE = (0, 34)
_KEY, _ENGINE = "option.entryPoint", "option.llm_engine"


def role_of(config: Config, path: Path | None) -> Role:
    """Decide as LMI does: without an entry point model.py is it, and LMI's handler of vLLM tries the function first.

    An engine that the file or the command names by option.llm_engine stands behind it like that handler.

    Args:
        path: the file; None where there is none.
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
    """Whether a file has a function `handle` that is not the engine's own."""
    tree = _parsed(path)
    return tree is not None and _has_handle(tree)


def unused_handle(config: Config, path: Path | None) -> str:
    """Say why a function `handle` of the file is not called; "" where it is, or where there is none."""
    if path is None or config.handle_role is not Role.NONE or not has_own_handle(path):
        return ""
    entry = config.settings.get(_KEY, "")
    if entry not in ("", _FILE):
        return f"{path}: handle is not called: {_KEY}={entry} does not call it"
    return f"{path}: handle is not called in AWS's vLLM image (SM_VLLM_*)" if _is_aws(config) else ""


def _is_aws(config: Config) -> bool:
    return config.origins.get(_ENGINE, "").startswith("environment variable SM_VLLM")


def describe_model_py(path: Path, config: Config) -> str:
    """Say what a file has, and what of it is called."""
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
    """Whether the file has a function of its own under the name; the last binding counts."""
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
    """Whether the file imports one of LMI's handlers, perhaps within a function."""
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
