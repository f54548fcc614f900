"""Names and types of native engine arguments, from the source of the installed engine or from a bundled list."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cache, partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from handler.config.options.option import read_json
from handler.core.numbers import is_digits

NAMES = {"vllm": "vLLM", "trtllm": "TensorRT-LLM"}

_CLASSES = {
    "vllm": ("vllm", "engine/arg_utils.py", "EngineArgs"),
    "trtllm": ("tensorrt_llm", "llmapi/llm_args.py", "TorchLlmArgs"),
}
"""Maps an engine to the package, file and class of its arguments. The file is parsed, because importing it is slow."""

_PLAIN = {
    "bool": "bool", "int": "int", "float": "float", "str": "str", "None": "null", "dict": "object", "Dict": "object",
    "Mapping": "object", "list": "list", "List": "list", "set": "list", "tuple": "list", "Sequence": "list",
    "HfOverrides": "object", "MaxLoRARanks": "int", "OptimizationLevel": "int", "Path": "str", "PathLike": "str",
    "PositiveInt": "int", "NonNegativeInt": "int", "PositiveFloat": "float", "NonNegativeFloat": "float",
}  # fmt: skip
_WORDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "list": "a JSON array",
    "object": "a JSON object",
    "str": "a string",
    "null": "null",
}
"""Maps each type to its description. The type `any` represents a class or type alias of the engine, which then checks
the value itself.
"""

_OF_JSON = {
    bool: {"bool"},
    int: {"int", "float"},
    float: {"float"},
    str: {"str"},
    list: {"list"},
    dict: {"object"},
    type(None): {"null"},
}


class Argument(NamedTuple):
    """An argument of an engine.

    Attributes:
        types: the names of the accepted types, as in `_WORDS`.
        first: the first release that has the argument, or "" for an installed engine.
        last: the last release that has the argument, or "" for an installed engine.
    """

    types: frozenset[str]
    first: str = ""
    last: str = ""


class EngineArguments(NamedTuple):
    """The arguments of an engine.

    Attributes:
        source: the engine name, with the installed version or the releases that the bundled list covers.
        arguments: the arguments by name.
    """

    source: str
    arguments: Mapping[str, Argument]


@cache
def engine_arguments(engine: str) -> EngineArguments:
    """Return the native arguments of the installed engine, or else those in the bundled list."""
    if engine not in _CLASSES:
        return EngineArguments(engine, {})
    package, file, name = _CLASSES[engine]
    for directory in _directories(package):
        try:
            fields = read_class(Path(directory, file).read_text(encoding="utf-8"), name)
        except (OSError, SyntaxError, ValueError):
            continue
        if fields:
            arguments = {key: Argument(types) for key, types in fields.items()}
            return EngineArguments(f"{NAMES[engine]}{_version(Path(directory))}", arguments)
    return shipped(engine)


@cache
def shipped(engine: str, part: str = "engine") -> EngineArguments:
    """Return the arguments in a bundled list, which `python -m tests.unit.config.engine_arguments` generates.

    Args:
        engine: the name of the engine.
        part: "engine", or "server" for the arguments of the vLLM HTTP server.
    """
    data = _shipped_data(engine)
    arguments = {
        key: Argument(frozenset(types.split("|")), *releases) for key, (types, *releases) in data[part].items()
    }
    return EngineArguments(f"{NAMES[engine]} {data['releases'][0]} to {data['releases'][-1]}", arguments)


def choice(engine: str, name: str, text: str) -> str:
    """Parse an argument with a fixed list of values. If the engine is installed, it checks the value itself."""
    values: list[str] = _shipped_data(engine)["choices"][name]
    if text not in values and not _directories(_CLASSES[engine][0]):
        raise ValueError(f"must be one of {', '.join(values)} ({shipped(engine).source})")
    return text


@cache
def _shipped_data(engine: str) -> Any:
    return json.loads((files("handler.config.options") / f"{engine}_arguments.json").read_text(encoding="utf-8"))


def _directories(package: str) -> list[str]:
    try:
        spec = find_spec(package)
    except ValueError:  # the package has been imported and has no source
        return []
    return list(spec.submodule_search_locations or ()) if spec else []


def _version(directory: Path) -> str:
    """Read the version from the package files, because the pip name differs between builds for different devices."""
    for file in ("_version.py", "version.py"):
        with suppress(OSError):
            if version := re.search(r"""__version__ = (?:version = )?["']([^"']+)""", (directory / file).read_text()):
                return f" {version[1]}"
    return ""


# -- types -----------------------------------------------------------------------------------------------------------


def read_class(source: str, name: str) -> dict[str, frozenset[str]]:
    """Return the types of the public annotated fields of a class and of its bases in the same source, by name."""
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        return {}
    fields: dict[str, frozenset[str]] = {}
    for base in classes[name].bases:
        if isinstance(base, ast.Name):
            fields |= read_class(source, base.id)
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            types = frozenset(_types(node.annotation))
            if "ClassVar" not in types:
                fields[node.target.id] = types
    return fields


def _types(node: ast.expr) -> set[str]:
    match node:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _types(left) | _types(right)
        case ast.Constant(value=None):
            return {"null"}
        case ast.Constant(value=str(text)):
            return _types(ast.parse(text, mode="eval").body)
        case ast.Subscript(value=value, slice=parameters):
            return _generic(ast.unparse(value).rpartition(".")[2], parameters)
        case ast.Name() | ast.Attribute():
            name = ast.unparse(node).rpartition(".")[2]
            return {_PLAIN.get(name) or ("object" if name.endswith(("Config", "Args")) else "any")}
    return {"any"}


def _generic(name: str, parameters: ast.expr) -> set[str]:
    several = parameters.elts if isinstance(parameters, ast.Tuple) else [parameters]
    match name:
        case "Optional":
            return _types(parameters) | {"null"}
        case "Union":
            return set().union(*map(_types, several))
        case "Annotated":
            return _types(several[0])
        case "Literal":
            values = [node.value for node in several if isinstance(node, ast.Constant)]
            return {"null" if value is None else type(value).__name__ for value in values}
        case "type" | "Type" | "Callable":
            return set()  # no string or JSON value has such a type
        case "ClassVar":
            return {"ClassVar"}
    return {_PLAIN.get(name, "any")}


def parser(types: Collection[str]) -> Callable[[str], Any]:
    """Return a parser for arguments of these types."""
    return partial(_parse, types=frozenset(types))


def _parse(text: str, types: frozenset[str]) -> Any:
    lowered = text.lower()
    if "bool" in types and lowered in ("true", "false"):
        return lowered == "true"
    if "null" in types and lowered in ("null", "none"):
        return None
    for name, convert in (("int", int), ("float", float)):
        if name in types:
            with suppress(ValueError):
                return convert(text)
    if text[:1] in ("{", "["):
        try:
            value = read_json(text)
        except ValueError as error:
            if not types & {"str", "any"}:
                raise ValueError(f"must be {_words(types)}: {error}") from None
        else:
            if fits(value, types):
                return value
    elif "list" in types and text and "str" not in types:
        return [_item(item.strip()) for item in text.split(",")]
    if types & {"str", "any"} and text:
        return text
    raise ValueError(f"must be {_words(types)}")


def _item(text: str) -> int | str:
    return int(text) if is_digits(text) else text


def check(value: Any, types: Collection[str]) -> None:
    """Check the type of a JSON value.

    Raises:
        ValueError: if the value has none of the types.
    """
    if not fits(value, types):
        raise ValueError(f"must be {_words(types)}")


def fits(value: Any, types: Collection[str]) -> bool:
    """Return whether a JSON value has one of the types."""
    return "any" in types or not _OF_JSON[type(value)].isdisjoint(types)


def _words(types: Collection[str]) -> str:
    return " or ".join(words for name, words in _WORDS.items() if name in types)
