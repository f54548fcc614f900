"""Kinds of servers by URL and by gRPC: one line and one object for each, and nothing else asks for their names."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

import handler.engines
from handler.config.config import Config
from handler.config.engines import ENGINES
from handler.core.errors import ConfigError
from handler.core.values import Task
from handler.engines.base import Capabilities, EngineConfig
from handler.engines.grpc.client import CONTRACTS
from handler.engines.openai import engine
from handler.engines.openai.kind import ServerKind
from handler.engines.openai.kinds import KINDS
from handler.engines.remote.servers import Software

ENGINES_DIRECTORY = Path(handler.engines.__file__).parent
NAMES = {name for entry in ENGINES.values() for name in entry.kinds}


def test_each_kind_has_the_name_by_which_it_is_chosen() -> None:
    for kinds in (KINDS, CONTRACTS):
        assert {name: kind.software.name for name, kind in kinds.items()} == {name: name for name in kinds}


def test_the_owner_of_a_model_tells_one_kind() -> None:
    assert not [pair for pair in permutations(KINDS.values(), 2) if pair[0].owner.startswith(pair[1].owner)]


@pytest.mark.parametrize("folder", ["openai", "remote", "grpc", "llamacpp"])
def test_no_code_compares_the_name_of_a_kind(folder: str) -> None:
    for file in sorted((ENGINES_DIRECTORY / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            tested: Sequence[ast.AST] = ()
            if isinstance(node, ast.Compare):
                tested = [node.left, *node.comparators]
            elif isinstance(node, ast.MatchValue):
                tested = [node.value]
            texts = {leaf.value for part in tested for leaf in ast.walk(part) if isinstance(leaf, ast.Constant)}
            assert not texts & NAMES, f"{file}:{getattr(node, 'lineno', 0)}"


# -- a kind with an API of its own -------------------------------------------------------------------------------------


class Imaginary(ServerKind):
    """Notes what it is asked."""

    software = Software("imaginary")
    owner = "imaginary-"
    tasks = (Task.GENERATION, Task.RERANK)
    no_task = "cannot do that"

    def __init__(self) -> None:
        self.asked = list[str]()

    def _note(self, name: str) -> Any:
        self.asked.append(name)
        return name

    def capabilities(self, config: EngineConfig) -> Capabilities:
        return self._note("capabilities")  # type: ignore[no-any-return]

    def fetch(self, model_id: str | None, config: EngineConfig) -> str | None:
        return self._note("fetch")  # type: ignore[no-any-return]

    def directory(self, model_id: str | None, config: EngineConfig) -> Path | None:
        return self._note("directory")  # type: ignore[no-any-return]

    def load(self, config: EngineConfig) -> Any:
        return self._note("load")

    def load_tokenizer(self, config: EngineConfig) -> Any:
        return self._note("load_tokenizer")

    def checks_structured_output(self, urls: Sequence[str]) -> bool:
        self._note(f"checks {urls}")
        return False

    def structured_output_check(self, config: EngineConfig) -> Any:
        return self._note("structured_output_check")


def config(task: Task = Task.GENERATION) -> EngineConfig:
    options = {"base_url": ("http://a/v1",), "base_url_kind": "imaginary"}
    return EngineConfig(Config(engine_options=options), task=task)


@pytest.fixture
def imaginary(monkeypatch: pytest.MonkeyPatch) -> Imaginary:
    monkeypatch.setitem(KINDS, "imaginary", kind := Imaginary())
    return kind


def test_the_engine_asks_the_kind_itself(imaginary: Imaginary) -> None:
    engine.check("/a/model", config())
    engine.fetch("/a/model", config())
    engine.prepare("/a/model", config())
    engine.capabilities(config(Task.RERANK))
    engine.load(config())
    engine.load_tokenizer(config())
    assert not engine.checks_structured_output(config())
    engine.structured_output_check(config())
    asked = ["directory", "fetch", "directory", "capabilities", "load", "load_tokenizer", "checks ('http://a/v1',)"]
    assert imaginary.asked == [*asked, "structured_output_check"]


@pytest.mark.parametrize("ask", [engine.capabilities, engine.load, engine.load_tokenizer])
def test_a_task_that_the_kind_lacks_is_refused_first(imaginary: Imaginary, ask: Any) -> None:
    with pytest.raises(ConfigError, match="servers of the kind imaginary cannot do that"):
        ask(config(Task.EMBEDDING))
    assert not imaginary.asked


def test_a_file_is_not_enough_unless_the_kind_says_so(imaginary: Imaginary, monkeypatch: pytest.MonkeyPatch) -> None:
    for ask in (engine.check, engine.fetch, engine.prepare):
        with pytest.raises(ConfigError, match=r"kind=imaginary: the MODEL can be a \.gguf file only for llama"):
            ask("owner/model/file.gguf", config())
    assert not imaginary.asked
    monkeypatch.setattr(Imaginary, "reads_gguf", True)
    assert engine.fetch("owner/model/file.gguf", config()) == "fetch"
