"""Guides compiled beside the engine: in what order, and what holds whom up."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import pytest

from handler.core.values import StructuredOutput
from handler.engines.openvino.structured_output import GrammarCompiler
from handler.engines.structured_output.validator import sort

# -- grammar compiler --------------------------------------------------------------------------------------------------
# Guides compiled beside the engine: in what order requests begin, and what holds whom up. The compiler is a double.


QUICK, SLOW, BAD = (
    StructuredOutput("regex", "quick"),
    StructuredOutput("regex", "slow"),
    StructuredOutput("regex", "bad"),
)


class Compile:
    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.seen: list[StructuredOutput] = []

    def __call__(self, structured_output: StructuredOutput) -> None:
        self.seen.append(structured_output)
        if structured_output == SLOW:
            self.go_on.wait(10)
        if structured_output == BAD:
            raise ValueError("no such thing")


@pytest.fixture
def compile() -> Iterator[Compile]:
    found = Compile()
    yield found
    found.go_on.set()  # its thread ends waiting


def until(compiler: GrammarCompiler, number: int) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    deadline = time.monotonic() + 10
    while len(found) < number and time.monotonic() < deadline:
        found += compiler.step(idle=True)
    return found


def test_one_is_ready_or_says_why_not(compile: Compile) -> None:
    compiler = GrammarCompiler(compile)
    assert compiler.step(idle=True) == []
    compiler.add(1, QUICK)
    compiler.add(2, BAD)
    assert until(compiler, 2) == [(1, ""), (2, "no such thing")]


def test_a_known_guide_is_not_compiled_again_and_a_bad_one_is(compile: Compile) -> None:
    compiler = GrammarCompiler(compile)
    for key, structured_output in enumerate((QUICK, BAD, QUICK, BAD)):
        compiler.add(key, structured_output)
    assert [key for key, _ in until(compiler, 4)] == [0, 2, 1, 3], "the known one overtakes"
    assert compile.seen == [QUICK, BAD, BAD]


def test_those_with_the_same_guide_begin_together(compile: Compile) -> None:
    compiler = GrammarCompiler(compile)
    for key in range(5):
        compiler.add(key, QUICK)
    first: list[tuple[int, str]] = []
    while not first:
        first = compiler.step(idle=True)
    assert first == [(key, "") for key in range(5)]


def test_the_next_is_not_compiled_before_the_ready_have_begun(compile: Compile) -> None:
    compiler = GrammarCompiler(compile)
    compiler.add(1, QUICK)
    compiler.add(2, SLOW)
    assert until(compiler, 1) == [(1, "")]
    assert compile.seen == [QUICK]
    assert compiler.step(idle=False) == []
    compile.go_on.set()
    assert until(compiler, 1) == [(2, "")]


def test_a_slow_one_does_not_hold_up_a_step(compile: Compile) -> None:
    """Only the one that hands it over waits, for a few milliseconds."""
    compiler = GrammarCompiler(compile)
    compiler.add(1, SLOW)
    compiler.add(2, QUICK)
    assert compiler.step(idle=False) == []
    began = time.monotonic()
    for _ in range(4000):
        assert compiler.step(idle=False) == []
    assert time.monotonic() - began < 15, "to wait in each takes twenty"
    compile.go_on.set()
    assert until(compiler, 2) == [(1, ""), (2, "")]


def test_what_nobody_waits_for_is_not_compiled(compile: Compile) -> None:
    compiler = GrammarCompiler(compile)
    for key, structured_output in enumerate((SLOW, BAD, QUICK)):
        compiler.add(key, structured_output)
    assert compiler.step(idle=False) == []
    compiler.cancel(1)
    compiler.cancel(0)
    compile.go_on.set()
    assert until(compiler, 2) == [(0, ""), (2, "")]
    assert compile.seen == [SLOW, QUICK]


def test_known_guides_go_before_those_that_wait(compile: Compile) -> None:
    compiler = GrammarCompiler(compile)
    compiler.add(1, QUICK)
    assert until(compiler, 1) == [(1, "")]
    compiler.add(2, SLOW)
    assert compiler.step(idle=False) == []
    compiler.add(3, StructuredOutput("regex", "unknown"))
    compiler.add(4, QUICK)
    assert compiler.step(idle=False) == [], "GenAI's lock would hold the whole engine up"
    compile.go_on.set()
    assert until(compiler, 2) == [(2, ""), (4, "")]
    assert until(compiler, 1) == [(3, "")]


# -- sorts of texts that wait to be compiled ------------------------------------------------------------------------


def test_an_everyday_schema_is_of_another_sort_than_costly_texts() -> None:
    def schema(schema: object) -> StructuredOutput:
        return StructuredOutput("json_schema", json.dumps(schema))

    everyday = schema({"type": "object", "properties": {"a": {"type": "integer"}}})
    costly = [
        schema({"type": "object", "properties": {"a": {"type": "string", "pattern": "(a{1,99}){1,99}"}}}),
        schema({"type": "object", "properties": {"a": {"$ref": "#"}}}),
        schema({"type": "object", "properties": {f"a{n}": {"type": "integer"} for n in range(99)}}),
        schema({"anyOf": [{"$ref": "#/a"}] * 99}),
        StructuredOutput("regex", "(a{1,999}){1,999}"),
        StructuredOutput("grammar", 'root ::= root root | "a"'),
    ]
    sorts = [sort(everyday), *map(sort, costly)]
    assert len(set(sorts)) == len(sorts)
    assert sort(schema({"type": "object", "properties": {"b": {"type": "string"}}})) == sort(everyday)
