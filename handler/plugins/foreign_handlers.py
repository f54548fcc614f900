"""Static checks for a user's script. They refuse functions that this server does not call, and find missing packages.

The functions belong to AWS's vLLM image (the package model-hosting-container-standards 0.1.17) or to the LMI handlers
for scikit-learn and XGBoost. The script is parsed but not run.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from handler.core.errors import refuse
from handler.core.user_functions import HANDLERS, MIDDLEWARE, PING, THROTTLE, imports
from handler.plugins.stand_ins import StandIn

PACKAGE = "model_hosting_container_standards"

FUNCTIONS = {"custom_sagemaker_invocation_handler": "invoke", "custom_sagemaker_ping_handler": "ping"}
"""Maps the function names that AWS's package recognizes to the handlers that they define."""

_INSTEAD = {"invoke": HANDLERS, "ping": PING}

_BUILT_IN = "remove it: it is built into the server"
_SESSIONS = "set option.enable_stateful_sessions=true to enable sessions"
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
    "stateful_session_manager": _SESSIONS,
    "register_create_session_handler": _SESSIONS,
    "register_close_session_handler": _SESSIONS,
    "bootstrap": _BUILT_IN,
}
"""Maps names in AWS's package to what to use instead."""


def refuse_foreign_handlers(path: Path, tree: ast.Module, *, called: StandIn | None) -> None:
    """Check that a script has no functions for AWS's vLLM image that this server does not call. The script is not run.

    Args:
        called: the stand-in for AWS's package, or None if this server does not call custom handlers and middleware.

    Raises:
        ConfigError: if there are such functions. The message contains their lines and what to use instead.
    """
    if called is None:
        uses = list(_find(tree))
    else:
        lacking = ((line, name.rpartition(".")[2]) for line, name in called.lacking(tree))
        uses = [(line, name, _DECORATORS.get(name, HANDLERS)) for line, name in lacking]
    refuse(
        f"{path}, line {line}: {name} belongs to AWS's vLLM image and is not called here: {instead}"
        for line, name, instead in uses
    )


_PREDICTORS = {"prediction_handler", "init_handler"}
_SAGEMAKERS = {
    "model_fn": [["model_dir"]],
    "input_fn": [["request_body", "content_type"], ["request_body", "request_content_type"]],
    "predict_fn": [["input_data", "model"]],
    "output_fn": [["prediction", "accept"], ["prediction", "response_content_type"]],
}
"""Names and parameters by which LMI recognizes functions in a file without decorators."""
_HANDLER_NAMES = {"handle", *FUNCTIONS}


def refuse_predictors(path: Path, tree: ast.Module) -> None:
    """Check that a script is not written for LMI's scikit-learn and XGBoost handlers.

    Raises:
        ConfigError: if it is written for them. The message lists each function with its line.
    """
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    decorators = [(node, {ast.unparse(arg).rpartition(".")[2] for arg in node.decorator_list}) for node in functions]
    predictors = [node for node, names in decorators if names & _PREDICTORS]
    if not any(names for _, names in decorators) and not _HANDLER_NAMES & {node.name for node in functions}:
        predictors = [
            node for node in functions if [arg.arg for arg in node.args.args] in _SAGEMAKERS.get(node.name, ())
        ]
    refuse(
        f"{path}, line {node.lineno}: {node.name} is for LMI's scikit-learn and XGBoost handlers and is not called: "
        "this server only serves language models (documentation: custom-code)"
        for node in predictors
    )


def _find(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield the line and name of each function for, or import from, AWS's package, and what to use instead."""
    for node in tree.body:
        for name in _bound(node):
            if name in FUNCTIONS:
                yield node.lineno, name, _INSTEAD[FUNCTIONS[name]]
    for line, module, name in imports(ast.walk(tree)):
        if module.partition(".")[0] == PACKAGE:
            yield line, name or module, _DECORATORS.get(name, HANDLERS)


def _bound(node: ast.stmt) -> list[str]:
    """Return the names that a definition, assignment or import statement binds."""
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


# -- packages and objects that a user's file uses and this environment does not have -----------------------------------


NO_VLLM_OBJECTS = (
    "vLLM's own objects are not available: use the server's routes instead (documentation: migrating/aws-vllm)"
)


def missing(path: Path, stand_ins: Sequence[StandIn]) -> list[str]:
    """Return a message for each missing package that a file imports, and for each vLLM object that it uses.

    vLLM objects are attributes of `request.app.state` in AWS's image. Imports in a `try` block for optional packages
    and imports only for type checkers are ignored.

    Args:
        path: a file that is valid Python.
        stand_ins: the stand-ins for packages of which only a part is available.
    """
    tree = ast.parse(path.read_bytes(), str(path))
    reasons = {(line, f"{name} is not installed") for stand_in in stand_ins for line, name in stand_in.lacking(tree)}
    partly = {stand_in.package for stand_in in stand_ins}
    for line, module, _ in imports(node for node in _needed(tree) if not getattr(node, "level", 0)):
        package = module.partition(".")[0]
        if package not in partly and not _is_here(package, path.parent):
            reasons.add((line, f"{package} is not installed"))
    state = list(_of_state(ast.walk(tree)))
    assigned = {node.attr for node in state if isinstance(node.ctx, ast.Store)}
    reasons |= {
        (node.lineno, f"request.app.state.{node.attr}: {NO_VLLM_OBJECTS}")
        for node in state
        if node.attr not in assigned
    }
    return [f"{path}, line {line}: {reason}" for line, reason in sorted(reasons)]


def _needed(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield all nodes except those in a `try` block for an import or in an `if TYPE_CHECKING` block."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.Try) and _is_for_import(node):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        waiting += ast.iter_child_nodes(node)


def _is_for_import(node: ast.Try) -> bool:
    caught = {ast.unparse(handler.type) for handler in node.handlers if handler.type is not None}
    return isinstance(node.body[0], ast.Import | ast.ImportFrom) or bool(
        {"ImportError", "ModuleNotFoundError"} & caught
    )


def _is_here(package: str, beside: Path) -> bool:
    if (beside / package).is_dir() or (beside / f"{package}.py").is_file():
        return True
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # the package was imported in an unusual way
        return True


def _of_state(nodes: Iterable[ast.AST]) -> Iterator[ast.Attribute]:
    """Yield the attributes of `….app.state`."""
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Attribute(attr="state", value=ast.Attribute(attr="app"))):
                yield node
