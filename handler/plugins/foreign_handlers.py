"""Names of AWS's vLLM image in a user's script: found without running it, and refused where nothing calls them.

Names are those of AWS's package model-hosting-container-standards 0.1.17.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from handler.core.custom_handlers import HANDLERS, MIDDLEWARE, PING, THROTTLE
from handler.core.errors import ConfigError
from handler.plugins.stand_ins import StandIn

_PACKAGE = "model_hosting_container_standards"

FUNCTIONS = {"custom_sagemaker_invocation_handler": "invoke", "custom_sagemaker_ping_handler": "ping"}
"""Name of a function in the script -> what it answers."""

_INSTEAD = {"invoke": HANDLERS, "ping": PING}

_BUILT_IN = "leave it out: the server has it built in"
_DECORATORS = {
    "custom_invocation_handler": HANDLERS,
    "register_invocation_handler": HANDLERS,
    "custom_ping_handler": PING,
    "register_ping_handler": PING,
    "input_formatter": MIDDLEWARE,
    "output_formatter": MIDDLEWARE,
    "custom_middleware": f"{MIDDLEWARE}; for a throttle, {THROTTLE}",
    "inject_adapter_id": _BUILT_IN,
    "register_load_adapter_handler": _BUILT_IN,
    "register_unload_adapter_handler": _BUILT_IN,
    "stateful_session_manager": "option.enable_stateful_sessions=true has sessions",
    "register_create_session_handler": "option.enable_stateful_sessions=true has sessions",
    "register_close_session_handler": "option.enable_stateful_sessions=true has sessions",
    "bootstrap": _BUILT_IN,
}
"""Name in the package -> what to write instead."""


def refuse_foreign_handlers(path: Path | None, *, called: StandIn | None = None) -> None:
    """Refuse a script that has functions which nothing here calls; nothing of it runs.

    Args:
        called: what a host has of AWS's package that calls handlers and middleware; None for the others.

    Raises:
        ConfigError: naming each with its line, and what to write instead.
        SyntaxError, ValueError: it is no Python.
    """
    if path is None:
        return
    tree = ast.parse(path.read_bytes(), str(path))
    if called is None:
        found = list(_find(tree))
    else:
        lacking = ((line, name.rpartition(".")[2]) for line, name in called.lacking(tree))
        found = [(line, name, _DECORATORS.get(name, HANDLERS)) for line, name in lacking]
    if found:
        raise ConfigError(
            *(
                f"{path}, line {line}: {name} is of AWS's vLLM image and is not called here: {instead}"
                for line, name, instead in found
            )
        )


def _find(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield line, name and remedy of the functions and imports; a module imported whole stands for all of its names."""
    for node in tree.body:
        for name in _bound(node):
            if name in FUNCTIONS:
                yield node.lineno, name, _INSTEAD[FUNCTIONS[name]]
    for one in ast.walk(tree):
        if isinstance(one, ast.ImportFrom) and _is_theirs(one.module or ""):
            for alias in one.names:
                yield one.lineno, alias.name, _DECORATORS.get(alias.name, HANDLERS)
        elif isinstance(one, ast.Import):
            for alias in one.names:
                if _is_theirs(alias.name):
                    yield one.lineno, alias.name, HANDLERS


def _bound(node: ast.stmt) -> list[str]:
    """Return the names that a statement of the module binds to functions, possibly by assignment or import."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.ImportFrom | ast.Import):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.If | ast.Try | ast.With):
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        return [name for child in inner for name in _bound(child)]
    return []


def _is_theirs(module: str) -> bool:
    return module.partition(".")[0] == _PACKAGE
