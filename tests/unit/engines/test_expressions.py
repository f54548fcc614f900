"""Expressions in which one character may stand for each part that can be long."""

from __future__ import annotations

import json
import re

from handler.core.values import StructuredOutput
from handler.engines.structured_output.ebnf import abridged_expression, abridged_parts
from tests.one_test import in_one_test


@in_one_test(
    ("expression", "wanted"),
    [
        ("[a-z]{300}(([a-z]+ ?)+,?)+", "(?:[a-z]{300}|~)(?:((?:((?:[a-z]+|~) ?)+|~),?)+|~)"),
        (r"\d{3}-x{2,40}|(?:ab)*", r"\d{3}-(?:x{2,40}|~)|(?:(?:ab)*|~)"),
        ("(a)?(b)c{2,}?", "(a)?(b)(?:c{2,}?|~)"),
        (r"\((a)+[()](b)\)*", r"\((?:(a)+|~)[()](b)(?:\)*|~)"),
        (r"([()\]]|[^)])*[](]", r"(?:([()\]]|[^)~])*|~)[](]"),
        (".*x[ -~]?[!-é0-9]{40}", r"(?:[^\n\r~]*|~)x[ -}]?(?:[!-}" + "\x7f-é0-9]{40}|~)"),
        ("^" + "x" * 32 + "y?$", "^(?:" + "x" * 32 + "|~)y?$"),
        ("(?P<name>a+)(?=b)", "(?P<name>(?:a+|~))(?=b)"),
    ],
)
def test_what_can_be_long_can_be_passed_by(expression: str, wanted: str) -> None:
    assert abridged_expression(expression) == wanted
    re.compile(wanted)


@in_one_test("expression", ["((((a))", "a)+", "{", "a{", "\\", "[", "(?", "a{5,x}"])
def test_what_is_no_expression_is_left_to_the_engine(expression: str) -> None:
    abridged_expression(expression)


def test_patterns_are_found_wherever_a_schema_has_them() -> None:
    schema = {"anyOf": [{"pattern": "(a)+"}, {"patternProperties": {"(b)+": {"items": {"pattern": "c"}}}}]}
    found = abridged_parts(StructuredOutput("json_schema", json.dumps(schema)))
    assert {part.value for part in found} == {"(?:(a)+|~)", "(?:(b)+|~)", "c"}
    assert {part.kind for part in found} == {"regex"}
    assert abridged_parts(StructuredOutput("json_schema", '{"enum": [{"pattern": 1}, "pattern"], "pattern": []}')) == []
    assert abridged_parts(StructuredOutput("choice", '["(a)+"]')) == ()
