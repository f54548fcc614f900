"""The Dockerfile as stages of instructions, and its build context, without a builder."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).parents[3]
SECOND = "1.3.0rc29"
"""TensorRT-LLM in the second base of the trtllm image (TRTLLM_VERSION)."""


class Instruction(NamedTuple):
    """`value` is what stands behind the name, its lines joined, nothing expanded."""

    name: str
    value: str


class Stage(NamedTuple):
    name: str
    base: str
    instructions: tuple[Instruction, ...]

    def values(self, name: str) -> list[str]:
        return [instruction.value for instruction in self.instructions if instruction.name == name]

    def labels(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for value in self.values("LABEL") for pair in shlex.split(value))

    def environment(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for value in self.values("ENV") for pair in shlex.split(value))

    def command(self, name: str) -> list[str]:
        """Of ENTRYPOINT or CMD in exec form; the last one counts."""
        found: list[str] = json.loads(self.values(name)[-1])
        return found


def read(
    path: Path = ROOT / "Dockerfile", given: Mapping[str, str] = MappingProxyType({})
) -> tuple[dict[str, str], dict[str, Stage]]:
    """The ARGs before the first FROM, expanded, and the stages by name; `given` are those of `--build-arg`."""
    with path.open("rb") as file:
        structure = DockerfileParser(fileobj=_Copy(file.read())).structure
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    for found in structure:
        instruction = Instruction(found["instruction"], found["value"])
        if instruction.name == "FROM":
            base, _, name = instruction.value.partition(" AS ")
            stages[name] = Stage(name, expand(base, arguments), ())
        elif instruction.name == "ARG" and not stages:
            name, _, value = instruction.value.partition("=")
            arguments[name] = given.get(name) or expand(value, arguments)
        elif instruction.name != "COMMENT":
            name = list(stages)[-1]
            stages[name] = stages[name]._replace(instructions=(*stages[name].instructions, instruction))
    return arguments, stages


class _Copy:
    """What the parser takes for a file; it cannot write to ours."""

    def __init__(self, content: bytes) -> None:
        self._lines = content.splitlines(keepends=True)

    def seek(self, place: int) -> None:
        pass

    def readlines(self) -> list[bytes]:
        return self._lines


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`${NAME}`, the only form that our Dockerfile has outside RUN."""
    return re.sub(r"\$\{(\w+)\}", lambda found: variables[found[1]], text)


def context() -> Iterator[Path]:
    """The files that .dockerignore lets through, relative to the root; the last rule that fits decides."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    for name in sorted(entry.name for entry in ROOT.iterdir()):
        path = ROOT / name
        if not _allowed(Path(name), rules):
            continue
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and _allowed(file.relative_to(ROOT), rules):
                yield file.relative_to(ROOT)


def _allowed(path: Path, rules: list[str]) -> bool:
    allowed = True
    for rule in rules:
        pattern = rule.removeprefix("!")
        names = [*map(str, path.parents), str(path)]
        if pattern.startswith("**/"):
            fits = any(fnmatch.fnmatch(part, pattern[3:]) for part in path.parts)
        else:
            fits = any(fnmatch.fnmatch(name, pattern) for name in names if name != ".")
        if fits:
            allowed = rule.startswith("!")
    return allowed
