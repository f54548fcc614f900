"""What a user's file names that is not here: found without running it, and told, since the file may do without."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from handler.plugins.stand_ins import StandIn

VLLMS_OWN = "vLLM's own objects are not here: reach the model by the server's routes (documents: migrating/aws-vllm)"


def missing(path: Path, stand_ins: Sequence[StandIn]) -> list[str]:
    """Say which packages a file imports that are not installed, and which of vLLM's objects it takes from the request.

    An import that the file expects to fail is left out.

    Args:
        path: a file that compiles.
        stand_ins: packages of which a part is here.
    """
    tree = ast.parse(path.read_bytes(), str(path))
    found = {(line, f"{name} is not installed here") for one in stand_ins for line, name in one.lacking(tree)}
    partly = {one.package for one in stand_ins}
    for line, package in _imported(_needed(tree)):
        if package not in partly and not _is_here(package, path.parent):
            found.add((line, f"{package} is not installed here"))
    state = list(_of_state(ast.walk(tree)))
    own = {node.attr for node in state if isinstance(node.ctx, ast.Store)}
    found |= {(node.lineno, f"request.app.state.{node.attr}: {VLLMS_OWN}") for node in state if node.attr not in own}
    return [f"{path}, line {line}: {what}" for line, what in sorted(found)]


def _needed(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield all nodes but those below a `try` for an import, and below `if TYPE_CHECKING`."""
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
    caught = {ast.unparse(one.type) for one in node.handlers if one.type is not None}
    return isinstance(node.body[0], ast.Import | ast.ImportFrom) or bool(
        {"ImportError", "ModuleNotFoundError"} & caught
    )


def _imported(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module.partition(".")[0]


def _is_here(package: str, beside: Path) -> bool:
    if (beside / package).is_dir() or (beside / f"{package}.py").is_file():
        return True
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # it was imported in a way of its own
        return True


def _of_state(nodes: Iterable[ast.AST]) -> Iterator[ast.Attribute]:
    """Yield the attributes of `….app.state`."""
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Attribute(attr="state", value=ast.Attribute(attr="app"))):
                yield node
