"""Make the lists of engines' arguments that handler/config/options ships, of the engines' own sources.

    python -m tests.unit.config.engine_arguments vllm 0.20.2 0.21.0 ...
    python -m tests.unit.config.engine_arguments trtllm FILE

For vLLM it reads three files of each release's wheel, by range requests of pip's, and downloads no wheel.
TensorRT-LLM's wheels are too large for that: FILE has its arguments by name,
{"type": annotation, "versions": [...], "backend": ...}.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from handler.config.options import engine_arguments
from handler.config.options.engine_arguments import read_class

Fields = dict[str, frozenset[str]]
CHOICES = {"quantization": ("layers/quantization/__init__.py", "QuantizationMethods")}
"""Arguments of vLLM's with a list of values of its own: file, and the Literal in it."""
PARTS = {"engine": ("engine/arg_utils.py", "EngineArgs"), "server": ("/cli_args.py", "FrontendArgs")}


def merge(releases: Iterable[tuple[str, Fields]]) -> dict[str, list[str]]:
    """Join releases, oldest first: the newest types of each name, its first and its last release."""
    merged: dict[str, list[str]] = {}
    for release, fields in releases:
        for name, types in fields.items():
            first = merged[name][1] if name in merged else release
            merged[name] = ["|".join(sorted(types)), first, release]
    return dict(sorted(merged.items()))


def sources(package: str, version: str) -> Iterator[tuple[str, str]]:
    from pip._internal.network.lazy_wheel import LazyZipOverHTTP
    from pip._internal.network.session import PipSession

    command = ["install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-"]
    report = subprocess.run(
        [sys.executable, "-m", "pip", *command, "--only-binary", ":all:", f"{package}=={version}"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    url = json.loads(report.stdout)["install"][0]["download_info"]["url"]
    with zipfile.ZipFile(LazyZipOverHTTP(url, PipSession())) as wheel:
        for name in wheel.namelist():
            if name.endswith(tuple(file for file, _ in (*PARTS.values(), *CHOICES.values()))):
                yield name, wheel.read(name).decode()


def literal(source: str, name: str) -> list[str]:
    """Read the texts of `NAME = Literal[...]`."""
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=ast.Subscript(slice=ast.Tuple(elts=texts))):
                if found == name:
                    return [str(text.value) for text in texts if isinstance(text, ast.Constant)]
    raise LookupError(name)


def vllm(versions: list[str]) -> None:
    parts: dict[str, list[tuple[str, Fields]]] = {part: [] for part in PARTS}
    choices: dict[str, set[str]] = {name: set() for name in CHOICES}
    for version in versions:
        found = list(sources("vllm", version))
        for part, (file, name) in PARTS.items():
            fields = [read_class(text, name) for path, text in found if path.endswith(file)]
            parts[part].append((".".join(version.split(".")[:2]), max(fields, key=len)))
        for argument, (file, name) in CHOICES.items():
            choices[argument].update(*[literal(text, name) for path, text in found if path.endswith(file)])
    releases = [release for release, _ in parts["engine"]]
    lists = {part: merge(fields) for part, fields in parts.items()}
    write("vllm", releases, {**lists, "choices": {name: sorted(values) for name, values in choices.items()}})


def annotation(text: str) -> str:
    """Keep what Python can read; a list of classes in words is `Any`."""
    try:
        ast.parse(text, mode="eval")
    except SyntaxError:
        return "Any"
    return text


def trtllm(file: Path) -> None:
    facts = {name: fact for name, fact in json.loads(file.read_text()).items() if fact["backend"] == "pytorch"}
    fields = "\n".join(f"    {name}: {annotation(fact['type'])}" for name, fact in facts.items())
    types = read_class(f"class LlmArgs:\n{fields}\n", "LlmArgs")
    releases = sorted({version for fact in facts.values() for version in fact["versions"]})
    by_release = [
        (release, {name: types[name] for name, fact in facts.items() if release in fact["versions"]})
        for release in releases
    ]
    write("trtllm", releases, {"engine": merge(by_release)})


def write(engine: str, releases: list[str], parts: dict[str, dict[str, list[str]]]) -> None:
    """Write one argument a line."""
    lines = [f'{{\n"releases": {json.dumps(releases)}']
    for part, merged in parts.items():
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in merged.items())
        lines.append(f'"{part}": {{\n{rows}\n}}')
    path = Path(engine_arguments.__file__).with_name(f"{engine}_arguments.json")
    path.write_text(",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "trtllm":
        trtllm(Path(sys.argv[2]))
    else:
        vllm(sys.argv[2:])
