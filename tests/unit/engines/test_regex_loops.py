"""Repeated groups of expressions, as expressions of their own."""

from __future__ import annotations

import json

import pytest

from handler.core.values import StructuredOutput
from handler.engines.structured_output.regex_loops import loops, loops_of


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("[a-z]{300}(([a-z]+ ?)+,?)+", ["([a-z]+ ?)+", "(([a-z]+ ?)+,?)+"]),
        ("x(?:a|b){2,3}", ["(?:a|b){2,3}"]),
        ("(a)?(b)", []),
        (r"\((a)+[()](b)\)*", ["(a)+"]),
        (r"([()\]]|[^)])*[](]", [r"([()\]]|[^)])*"]),
        ("((((a))", []),
        ("a)+", []),
    ],
)
def test_repeated_groups_are_found(expression: str, found: list[str]) -> None:
    assert [*loops(expression)] == found


def test_patterns_are_found_wherever_a_schema_has_them() -> None:
    schema = {"anyOf": [{"pattern": "(a)+"}, {"patternProperties": {"(b)+": {"items": {"pattern": "(c)+"}}}}]}
    found = loops_of(StructuredOutput("json_schema", json.dumps(schema)))
    assert {part.value for part in found} == {"(a)+", "(b)+", "(c)+"}
    assert {part.kind for part in found} == {"regex"}
    tag = {"format": {"type": "tag", "content": {"type": "json_schema", "json_schema": schema}}}
    assert loops_of(StructuredOutput("structural_tag", json.dumps(tag))) == found
    assert loops_of(StructuredOutput("json_schema", '{"enum": [{"pattern": 1}, "pattern"], "pattern": []}')) == []
    assert loops_of(StructuredOutput("choice", '["(a)+"]')) == ()
